"""One step in other variables: weights and gradients go there and the step comes back, or they are as before.

Every parameter that a matrix multiplies from the right is brought into one canonical shape, stack × groups × outputs ×
inputs with the first two as one dimension; a stack of one is a view of the parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._device import at_least_float32, widest
from .._distributed import add_up_shards, local
from ..functional.patches import as_matrices, from_matrices
from ..rows.layers import Layout
from .roots import RightFactor


@dataclass(eq=False)
class Stack:
    r"""The parameters of a layer, or of several of one shape, and a step on them.

    .. math:: \tilde G' = \tilde G R, \qquad \tilde W' = \tilde W R^{-1}, \qquad \Delta\tilde W = \Delta\tilde W' R

    Args:
        parameters: weight and bias of each layer, or its weight alone, layer after layer.
        factors: R, block by block of the inputs.
        layout: how the parameters lie as matrices; None leaves them as they are, for entrywise factors.
        layers: how many there are in the stack.
        blocks: the inputs that each factor multiplies; the bias goes with the last of them.
        moves_weights: whether weights and steps are mapped, or the gradients alone.
        keeps_norm: whether each layer's step, mapped back, gets the Frobenius norm that the optimizer gave it.
        shrink: the factor of weight and step where the learning rate is not 0.
    """

    parameters: Sequence[nn.Parameter]
    factors: Sequence[RightFactor]
    _: KW_ONLY
    layout: Layout | None = None
    layers: int = 1
    blocks: Sequence[slice] = (slice(None),)
    moves_weights: bool = True
    keeps_norm: bool = False
    shrink: float = 1.0
    #: Whether the learning rate is 0, and whether the optimizer may read the weights in the step.
    has_zero_lr, is_read = False, True

    def __post_init__(self) -> None:
        self.shapes = [local(parameter).shape for parameter in self.parameters[: len(self.parameters) // self.layers]]
        self.forget()

    def forget(self) -> None:
        """Free the tensors of one step."""
        self.gradients: list[Tensor | None] = []
        self._parts: list[Tensor] = []
        #: The weights before the step, as the optimizer finds them if it reads them, and after its step; joined.
        self.old: list[Tensor] = []
        self.mapped_old: list[Tensor] = []
        self.after: list[Tensor] = []
        #: Minus the step, mapped back, and the factors of the old weights beside it.
        self.minus_steps: list[Tensor] = []
        self.keep: list[float] = []
        #: The norms of each layer's step before and after it is mapped back, (2, layers); of this process's shard.
        self.norms: Any = None

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the parameters' shapes in the canonical shape; a bias has one column."""
        if self.layout is None:
            return [*parts]
        kinds = len(self.shapes)
        each = parts if self.layers == 1 else [torch.stack([*parts[kind::kinds]]) for kind in range(kinds)]
        return [as_matrices(part, *self.layout, self.layers) for part in each]

    def split(self, joined: Sequence[Tensor]) -> list[Tensor]:
        """Take joined tensors apart again: the inverse of `join`."""
        if self.layout is None:
            return [*joined]
        pairs = zip(joined, self.shapes, strict=True)
        every = [from_matrices(matrices, self.layout.transposed, shape, self.layers) for matrices, shape in pairs]
        if self.layers == 1:
            return every
        return [part for layer in zip(*(parts.unbind() for parts in every), strict=True) for part in layer]

    def _times(self, factors: Sequence[RightFactor], parts: list[Tensor], overwrite: bool = False) -> list[Tensor]:
        """Return [W, b] times a matrix, block by block; it may overwrite the parts."""
        if len(factors) == 1:
            return factors[0].right_multiply(parts, overwrite)
        weight, *bias = parts
        blocks = [[weight[..., block]] for block in self.blocks]
        blocks[-1] += bias
        products = [factor.right_multiply(block, overwrite) for factor, block in zip(factors, blocks, strict=True)]
        return [torch.cat([product[0] for product in products], -1), *products[-1][1:]]

    def _local_parameters(self) -> list[Tensor]:
        """Return their memory in this process; an optimizer that reads weights may put other memory in its place."""
        if self.moves_weights and (self.is_read or not self._parts):
            self._parts = [local(parameter) for parameter in self.parameters]
        return self._parts

    def enter(self, decays: Mapping[int, float]) -> None:
        """Keep gradients and weights, and write both in the new variables; for `decays` see `take_step`.

        Where the optimizer reads no weights it finds zeros: a weight that was 0 holds the step itself afterwards.
        """
        self.gradients = [p.grad for p in self.parameters]
        if self.moves_weights:
            joined = self.join(self._local_parameters())
            self.old = joined if self.layers > 1 else [w.clone(memory_format=torch.preserve_format) for w in joined]
            self.is_read = any(id(p) not in decays for p in self.parameters)
            self.keep = [decays.get(id(p), 1.0) for p in self.parameters[: len(joined)]]  # layers share groups
        gradients = [_placed_as(p, p.grad) for p in self.parameters if p.grad is not None]
        joined = [at_least_float32(each) for each in self.join([local(gradient) for gradient in gradients])]
        mapped = self._times(self.factors, joined)
        for parameter, gradient, new in zip(self.parameters, gradients, self.split(mapped), strict=True):
            parameter.grad = _laid_out_as(gradient, new)
        parts = self._local_parameters()
        if parts and not self.is_read:
            torch._foreach_zero_(parts)
        elif parts:
            inverse = [factor.inverse for factor in self.factors]
            there = self._times(inverse, [at_least_float32(old) for old in self.old])
            for part, value in zip(parts, self.split(there), strict=True):
                part.copy_(value)
            # As it is rounded to the parameters' precision.
            self.mapped_old = [value.to(old.dtype).to(value.dtype) for value, old in zip(there, self.old, strict=True)]

    def leave(self) -> None:
        """Give the user's gradients back, free the mapped ones, and map the step back."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is not None:  # else the optimizer has freed it
                parameter.grad = gradient
        if not self.moves_weights:
            return
        self.after = self.join(self._local_parameters())
        if self.is_read:
            every = zip(self.mapped_old, self.after, self.keep, strict=True)
            steps = [(start if keep == 1 else start.mul_(keep)).sub_(now) for start, now, keep in every]
        else:
            steps = [at_least_float32(now) for now in self.after]
            for step in steps:
                torch.sub(step.new_zeros(()), step, out=step)  # +0 where nothing moved, of either zero
        before = self._norms(steps)
        self.minus_steps = self._times(self.factors, steps, overwrite=True)
        if self.keeps_norm:
            norms = torch.stack(before + self._norms(self.minus_steps)).view(2, len(steps), self.layers, -1)
            self.norms = norms[:, 0, :, 0] if norms.numel() == 2 else torch.linalg.vector_norm(norms, dim=(1, 3))
        if self.shrink != 1 and not self.has_zero_lr:
            self.minus_steps = [step.mul_(self.shrink) for step in self.minus_steps]
            self.keep = [self.shrink * keep for keep in self.keep]

    def _norms(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the norms of the parts of a layer, or of each matrix in a stack of several layers."""
        dim = None if self.layers == 1 else (-2, -1)
        return [torch.linalg.vector_norm(part, dim=dim) for part in parts] if self.keeps_norm else []

    def write(self) -> None:
        """Let each weight be its factor times the old one, minus the rescaled step: w - (+0) is w for every w."""
        ratio: Tensor | None = None
        if self.norms is not None:
            copies = self.minus_steps[0].shape[0] // self.layers
            ratio = torch.nan_to_num_(self.norms[0] / self.norms[1], nan=1.0, posinf=1.0)  # 1 where there was no step
            ratio = (ratio if copies == 1 else ratio.repeat_interleave(copies))[:, None, None]
        new: list[Tensor] = []
        for old, now, step, keep in zip(self.old, self.after, self.minus_steps, self.keep, strict=True):
            weight = old.to(step.dtype)
            weight = weight if keep == 1 else weight * keep
            out = now if now.dtype == step.dtype else None
            if self.layout is None and self.is_read:  # an optimizer that sets a weight to zero means zero
                new.append(torch.where((now == 0) & (step != 0), now, weight - step))
            elif ratio is None:
                new.append(torch.sub(weight, step, out=out))
            else:
                new.append(torch.addcmul(weight, step, ratio, value=-1, out=out))
        self._copy(new)

    def restore(self) -> None:
        """Give parameters and gradients their values of before the step; nothing where that has not begun."""
        self._copy(self.old)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=False):
            parameter.grad = gradient

    def _copy(self, joined: Sequence[Tensor]) -> None:
        pairs = zip(self._local_parameters(), self.split(joined), strict=True) if joined else ()
        elsewhere = [(p, value) for p, value in pairs if not p.data_ptr() or p.data_ptr() != value.data_ptr()]
        if elsewhere:
            torch._foreach_copy_([p for p, _ in elsewhere], [value for _, value in elsewhere])


def take_step(stacks: Sequence[Stack], step: Callable[[], Any], decays: Mapping[int, float]) -> None:
    r"""Let an optimizer step in the variables of disjoint stacks; whatever ends that early, all they map is as it was.

    `decays` has by ids of weights the c of steps :math:`w \leftarrow c w + \Delta` whose Δ is free of w.
    """
    try:
        for stack in stacks:
            stack.enter(decays)
        step()
        for stack in stacks:
            stack.leave()
        _add_up_norms(stacks)
        for stack in stacks:
            stack.write()
    except BaseException:
        for stack in stacks:
            stack.restore()
        raise
    finally:
        for stack in stacks:
            stack.forget()


def _add_up_norms(stacks: Sequence[Stack]) -> None:
    """Add up the norms, by their squares, of weights of which each process holds some rows."""
    of_shards = [each for each in stacks if each.norms is not None and hasattr(each.parameters[0], "placements")]
    squares = [widest(each.norms).square() for each in of_shards]
    if of_shards:
        add_up_shards(zip((each.parameters[0] for each in of_shards), squares, strict=True))
    for each, total in zip(of_shards, squares, strict=True):
        each.norms = total.sqrt().to(each.norms)


def _placed_as(parameter: Any, gradient: Any) -> Tensor:
    """Deal a gradient to processes as its parameter is: tensor parallelism may leave parts to be added up."""
    wanted = getattr(parameter, "placements", None)
    return gradient if getattr(gradient, "placements", None) == wanted else gradient.redistribute(placements=wanted)


def _laid_out_as(old: Tensor, new: Tensor) -> Tensor:
    """Lay a new gradient out in the dtype, the memory layout and the shards of the old, as fused optimizers want."""
    if new.dtype == old.dtype and local(old) is old and new.stride() == old.stride():
        return new
    made = torch.empty_like(old)
    local(made).copy_(new)
    return made
