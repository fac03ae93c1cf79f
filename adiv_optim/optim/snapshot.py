"""A layer's parameters before an optimizer's step and after it, and which optimizers read no weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._linalg import host
from .._linalg.shards import local
from .chained import ChainedOptimizer
from .gradient_only import GradientOnly
from .probe import KNOWN, decoupled_decay, kind_of

#: How the decay of a kind of parameters acts, as `decoupled_decay` has measured it.
Kinds = dict[Any, Callable[[Any, float], Any] | None]


class Decay(NamedTuple):
    """The decay of a weight: its factor, and whether the step reads the weight otherwise."""

    factor: float
    read: bool = False


class Transform(ABC):
    """The change of variables of some parameters for one step: linear, on the parts that this process holds.

    Maps take and give tensors that `join` has made.
    """

    #: The parameters that the optimizer is to see in other variables.
    parameters: Sequence[nn.Parameter]
    #: Whether the weights are mapped too, or the gradients alone.
    moves_weights: bool = True
    #: Whether entries are mapped one by one, so that what an optimizer sets to zero is zero.
    entrywise: bool = False
    #: Whether `join` makes new tensors.
    copies: bool = False

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Put tensors of the parameters' shapes together for the maps."""
        return list(parts)

    def split(self, joined: Sequence[Tensor]) -> Sequence[Tensor]:
        """Take them apart again."""
        return joined

    @abstractmethod
    def gradients(self, gradients: list[Tensor]) -> list[Tensor]:
        """Map gradients to the new variables."""

    @abstractmethod
    def weights(self, weights: list[Tensor]) -> list[Tensor]:
        """Map weights there."""

    @abstractmethod
    def back(self, steps: list[Tensor]) -> list[Tensor]:
        """Map steps back to the model's variables; it may overwrite its argument."""


class Diagonal(Transform):
    r"""g' = g d e … and w' = w / (d e …) for one parameter and positive factors that broadcast to a view of it.

    Args:
        parameter: w.
        factors: d, e, …: numbers or tensors; of a sharded parameter about the part that is held here.
        shape: of the view; None is the parameter's own.
        watched: note the products of the step with itself and with what it is mapped back to, for `metrics`.
    """

    entrywise = True

    def __init__(
        self, parameter: nn.Parameter, factors: Sequence[float | Tensor], shape: tuple[int, ...] | None = None,
        watched: bool = False,
    ) -> None:  # fmt: skip
        self.parameters, self.factors, self.shape, self.watched = [parameter], factors, shape, watched
        #: If watched, before × before, before × after and after × after, (3,).
        self.products = torch.empty(0)

    def gradients(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return g d e …."""
        return [self._of_rows(part) if part.is_sparse else self._times(part, self.factors) for part in gradients]

    def weights(self, weights: list[Tensor]) -> list[Tensor]:
        """Return w / (d e …)."""
        return [self._times(weight, [1 / factor for factor in self.factors]) for weight in weights]

    def back(self, steps: list[Tensor]) -> list[Tensor]:
        """Return Δw' d e …."""
        before = [host.double(step.clone()) for step in steps] if self.watched else []
        for step in steps:
            for factor in self.factors:
                step.view(self.shape or step.shape).mul_(factor)
        for own, step in zip(before, steps if before else (), strict=True):
            after = host.double(step)
            self.products = torch.stack([(own * own).sum(), (own * after).sum(), (after * after).sum()])
        return steps

    def _times(self, tensor: Tensor, factors: Sequence[float | Tensor]) -> Tensor:
        product = tensor.view(self.shape or tensor.shape) * factors[0]
        for factor in factors[1:]:
            product.mul_(factor)
        return product.view(tensor.shape)

    def _of_rows(self, gradient: Tensor) -> Tensor:
        """Of a sparse gradient, whose rows are those that an embedding has read."""
        gradient = gradient.coalesce()
        values, rows = gradient.values(), gradient.indices()[0]
        for factor in self.factors:
            many = isinstance(factor, Tensor) and factor.shape[0] > 1
            values = values * (factor[rows] if many else factor)  # type: ignore[index]
        values = values.to(gradient.dtype)
        return torch.sparse_coo_tensor(gradient.indices(), values, gradient.shape, is_coalesced=True)


class Snapshot:
    """A transform's parameters and gradients as they were before the step, and the step once it is mapped back.

    Parameters that the optimizer does not read are 0 meanwhile: what they hold after the step is the step alone.

    Args:
        transform: the change of variables.
        decay: by the id of a parameter, of `decay_factors`.
        read: whether somebody may read the weights, whatever the optimizer does.
        rate: the learning rate.
    """

    def __init__(self, transform: Transform, decay: Mapping[int, Decay], read: bool, rate: Any = None) -> None:
        self.transform, self.rate = transform, rate
        self.moving = transform.parameters if transform.moves_weights else ()
        self.gradients = [p.grad for p in transform.parameters]
        joined = transform.join(self._parts()) if self.moving else []
        copied = joined if transform.copies else [old.clone(memory_format=torch.preserve_format) for old in joined]
        #: The weights before the step, as the optimizer finds them if they are read, and after its step; joined.
        self.old, self.start, self.now = copied, list[Tensor](), list[Tensor]()
        decays = [decay.get(id(p), Decay(1.0, read=True)) for p in self.moving]
        self.read = read or any(each.read for each in decays)
        #: The factors of the weights as the step is added: the decay, where it is known, and a method's own. What
        #: `join` puts together is alike.
        self.keep: list[float | Tensor] = [each.factor for each in decays[: len(joined)]]
        #: Minus the step, mapped back; and its factor, None for 1.
        self.steps: list[Tensor] = []
        self.ratio: Tensor | None = None

    def _parts(self) -> list[Tensor]:
        return [local(parameter).detach() for parameter in self.moving]

    def enter(self) -> None:
        """Write parameters and gradients in the new variables."""
        change = self.transform
        gradients = [_placed_as(p, p.grad) for p in change.parameters if p.grad is not None]
        mapped = change.split(change.gradients(change.join([local(gradient) for gradient in gradients])))
        for parameter, old, new in zip(change.parameters, gradients, mapped, strict=True):
            parameter.grad = _laid_out_as(old, new)
        if not self.moving:
            return
        parts = self._parts()
        if not self.read:
            for part in parts:
                part.zero_()
            return
        there = change.weights([old.to(host.wide(old)) for old in self.old])
        for part, value in zip(parts, change.split(there), strict=True):
            part.copy_(value)
        # As it is rounded to the parameters' precision.
        self.start = [value.to(old.dtype).to(value.dtype) for value, old in zip(there, self.old, strict=True)]

    def leave(self) -> None:
        """Give the user's gradients back, free the mapped ones, and map the step back."""
        for parameter, gradient in zip(self.transform.parameters, self.gradients, strict=True):
            if parameter.grad is not None:  # else the optimizer has freed it
                parameter.grad = gradient
        if not self.moving:
            return
        self.now = self.transform.join(self._parts())
        if self.read:
            for place, (start, now, keep) in enumerate(zip(self.start, self.now, self.keep, strict=True)):
                if keep != 1:  # known, but not taken in a step that does nothing, as the first of SOAP
                    self.keep[place] = torch.where((start != now).any(), keep, 1.0).to(start.dtype)
                    start.mul_(self.keep[place])
            steps = [start.sub_(now) for start, now in zip(self.start, self.now, strict=True)]
        else:
            steps = [now.to(host.wide(now)) for now in self.now]
            for step in steps:
                torch.sub(step.new_zeros(()), step, out=step)  # +0 where nothing moved, of either zero
        self.steps = self.transform.back(steps)

    def write(self) -> None:
        """Let each weight be its factor times the old one, minus the step: w - (+0) is w for every w."""
        new: list[Tensor] = []
        for old, now, step, keep in zip(self.old, self.now, self.steps, self.keep, strict=True):
            weight = old.to(step.dtype)
            if isinstance(keep, Tensor) or keep != 1:
                weight = weight * keep
            out = now if now.dtype == step.dtype else None
            if self.transform.entrywise and self.read:
                step = step if self.ratio is None else step * self.ratio
                new.append(torch.where(now == 0, now, weight - step))
            elif self.ratio is None:
                new.append(torch.sub(weight, step, out=out))
            else:
                new.append(torch.addcmul(weight, step, self.ratio, value=-1, out=out))
        self._copy(new)

    def restore(self) -> None:
        """Give parameters and gradients their values of before the step."""
        self._copy(self.old)
        for parameter, gradient in zip(self.transform.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    def _copy(self, joined: Sequence[Tensor]) -> None:
        pairs = zip(self._parts(), self.transform.split(joined), strict=True) if self.moving else ()
        elsewhere = [(part, value) for part, value in pairs if not part.data_ptr() == value.data_ptr() != 0]
        if elsewhere:
            torch._foreach_copy_([part for part, _ in elsewhere], [value for _, value in elsewhere])


def _placed_as(parameter: Any, gradient: Any) -> Tensor:
    """A gradient dealt to processes as its parameter is: tensor parallelism may leave parts to be added up."""
    wanted = getattr(parameter, "placements", None)
    return gradient if getattr(gradient, "placements", None) == wanted else gradient.redistribute(placements=wanted)


def _laid_out_as(old: Tensor, new: Tensor) -> Tensor:
    """A new gradient in the dtype, the memory layout and the shards of the old: fused optimizers want that."""
    if new.is_sparse or (new.dtype == old.dtype and local(old) is old and new.stride() == old.stride()):
        return new
    made = torch.empty_like(old)
    local(made).copy_(new)
    return made


def steppers(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer and those within it that take its step: of `GradientOnly` the inner one, of a chain its parts."""
    if type(optimizer) is GradientOnly:
        return [optimizer, *steppers(optimizer.inner)]
    if type(optimizer) is ChainedOptimizer:
        return [optimizer, *(stepper for part in optimizer.optimizers for stepper in steppers(part))]
    return [optimizer]


def hooked(optimizer: Optimizer) -> bool:
    """Whether there are hooks on a step, which may read the weights in it."""
    return any(each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks for each in steppers(optimizer))


def rests(group: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a parameter group is 0; one on a device is not waited for."""
    rate = group.get("lr")  # None where the optimizer finds its own, as Adafactor does
    return rate is not None and not (isinstance(rate, Tensor) and rate.device.type != "cpu") and float(rate) == 0


def decay_factors(optimizer: Optimizer, kinds: Kinds | None = None) -> dict[int, Decay]:
    r"""Find for weights, by their ids, the factor c of a step :math:`w \leftarrow c w + \Delta`.

    It is 1 without weight decay, and where that is decoupled mostly 1 − ηλ. Weights of which it is not known are left
    out: the decay is part of the gradient, the learning rate is on a device to be waited for, or the step has been
    replaced. Δ is free of w, but for optimizers that are not torch's own or are known to read it: see `Decay`.

    Args:
        optimizer: whose groups are read.
        kinds: how decays act, as far as it has been measured; more of it is added.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> list(decay_factors(torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)).values())
        [Decay(factor=0.95, read=False)]
        >>> decay_factors(torch.optim.SGD([weight], lr=0.1, weight_decay=0.5))
        {}
    """
    every, kinds = steppers(optimizer), {} if kinds is None else kinds
    if not all(map(_steps_as_its_type, every)):
        return {}
    factors: dict[int, Decay] = {}
    for each in every:
        if type(each) in (GradientOnly, ChainedOptimizer):
            continue
        read = type(each) not in KNOWN
        for group in each.param_groups:
            rate, decay, parameters = group.get("lr"), group.get("weight_decay", 0.0), group["params"]
            if isinstance(decay, Tensor):
                continue
            if not decay:
                factors |= dict.fromkeys(map(id, parameters), Decay(1.0, read))
            elif not isinstance(rate, Tensor) or rate.device.type == "cpu":
                kind = id(each), *kind_of(group)
                for ndim, like in {p.ndim: p for p in parameters}.items():
                    key = ndim, kind
                    if key not in kinds:
                        kinds[key] = decoupled_decay(each, group, like)
                    if factor := kinds[key]:
                        alike = [id(p) for p in parameters if p.ndim == ndim]
                        factors |= dict.fromkeys(alike, Decay(float(factor(rate, decay)), read))
    return factors


def _steps_as_its_type(optimizer: Optimizer) -> bool:
    """Whether its step is its type's; torch's schedulers set one on the instance that counts the calls and no more."""
    step = vars(optimizer).get("step")
    counted = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is None or counted
