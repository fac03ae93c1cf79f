"""A layer's parameters before an optimizer's step and after it, and which optimizers read no weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from .._linalg.shards import local
from .chained import ChainedOptimizer
from .gradient_only import GradientOnly

#: These read their state and the gradient, and a weight where it decays and nowhere else.
_KNOWN: set[type[Optimizer]] = {optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax}
_KNOWN |= {optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Muon}
#: Of these, those whose decay is always decoupled: w is multiplied by 1 − ηλ before the step is added.
_DECOUPLED: set[type[Optimizer]] = {optim.AdamW, optim.Muon}


class Transform(ABC):
    """The change of variables of some parameters for one step: linear, on the parts that this process holds."""

    #: The parameters that the optimizer is to see in other variables.
    parameters: Sequence[nn.Parameter]
    #: Whether the weights are mapped too, or the gradients alone.
    moves_weights: ClassVar[bool] = True
    #: Whether entries are mapped one by one, so that what an optimizer sets to zero is zero.
    entrywise: ClassVar[bool] = False

    @abstractmethod
    def gradients(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Map gradients to the new variables."""

    @abstractmethod
    def weights(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Map weights there."""

    @abstractmethod
    def back(self, steps: list[Tensor]) -> Sequence[Tensor]:
        """Map steps back to the model's variables; it may overwrite its argument."""


class Snapshot:
    """A transform's parameters and gradients as they were before the step, and the step once it is mapped back.

    Parameters that the optimizer does not read are -0 meanwhile: w + (-0) is w for every w, and what they hold after
    the step is the step alone.

    Args:
        transform: the change of variables.
        decay: by the id of a parameter its factor in `decay_factors`.
        read: whether somebody may read the weights, whatever the optimizer does.
    """

    def __init__(self, transform: Transform, decay: Mapping[int, float], read: bool) -> None:
        self.transform = transform
        self.moving = transform.parameters if transform.moves_weights else ()
        self.weights = [p.detach().clone(memory_format=torch.preserve_format) for p in self.moving]
        self.gradients = [p.grad for p in transform.parameters]
        known = all(id(p) in decay for p in self.moving)
        self.read = read or not known
        #: The factor of each weight as the step is added: the decay of an optimizer that does not read it, and a
        #: method's own.
        self.keep: list[float | Tensor] = [decay[id(p)] if known else 1.0 for p in self.moving]
        #: The factor of the step: a number on the device, or None for 1.
        self.ratio: Tensor | None = None
        #: The weights as the optimizer finds them, in the precision of the step, where they are read.
        self.start: list[Tensor] = []
        #: Minus the step, mapped back.
        self.steps: Sequence[Tensor] = []

    def enter(self) -> None:
        """Write parameters and gradients in the new variables."""
        gradients = [_placed_as(p, p.grad) for p in self.transform.parameters if p.grad is not None]
        mapped = self.transform.gradients([local(gradient) for gradient in gradients])
        for parameter, old, new in zip(self.transform.parameters, gradients, mapped, strict=True):
            parameter.grad = _laid_out_as(old, new)
        if not self.read:
            for parameter in self.moving:
                local(parameter).fill_(-0.0)
        elif self.moving:
            there = self.transform.weights([local(weight) for weight in self.weights])
            for parameter, value in zip(self.moving, there, strict=True):
                part = local(parameter).detach()
                part.copy_(value)  # which rounds it to the parameter's precision
                self.start.append(value if value.dtype == part.dtype else part.to(value.dtype))

    def leave(self) -> None:
        """Give the user's gradients back, free the mapped ones, and map the step back."""
        for parameter, gradient in zip(self.transform.parameters, self.gradients, strict=True):
            if parameter.grad is not None:  # else the optimizer has freed it
                parameter.grad = gradient
        steps = []
        for place, parameter in enumerate(self.moving):
            now = local(parameter).detach()
            if not self.read:
                now = now.to(torch.promote_types(now.dtype, torch.float32))
                steps.append(torch.sub(now.new_zeros(()), now, out=now))  # +0 where nothing moved, of either zero
            else:
                start, factor = self.start[place], self.keep[place]
                steps.append((start if factor == 1 else start.mul_(factor)).sub_(now))
        self.steps = self.transform.back(steps) if steps else steps

    def write(self) -> None:
        """Let each weight be its factor times the old one, minus `steps`: w - (+0) is w for every w."""
        for parameter, old, keep, step in zip(self.moving, self.weights, self.keep, self.steps, strict=True):
            now, weight = local(parameter).detach(), local(old).to(step.dtype)
            if isinstance(keep, Tensor) or keep != 1:
                weight = weight * keep
            if self.transform.entrywise and self.read:
                now.copy_(torch.where(now == 0, now, weight - step))
            elif now.dtype != step.dtype:
                now.copy_(weight - step if self.ratio is None else weight - step.mul_(self.ratio))
            elif self.ratio is None:
                torch.sub(weight, step, out=now)
            else:
                torch.addcmul(weight, step, self.ratio, value=-1, out=now)

    def restore(self) -> None:
        """Give parameters and gradients their values of before the step."""
        for parameter, value in zip(self.moving, self.weights, strict=True):
            parameter.copy_(value)
        for parameter, gradient in zip(self.transform.parameters, self.gradients, strict=True):
            parameter.grad = gradient


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


def decay_factors(optimizer: Optimizer) -> dict[int, float]:
    r"""For each weight, by its id, the factor c of a step :math:`w \leftarrow c w + \Delta` with a Δ that is free of w.

    It is 1 without weight decay, and 1 − ηλ where that is decoupled. Weights of which it is not known are left out:
    the decay is part of the gradient, the learning rate is on a device to be waited for, the optimizer is not torch's
    own, or its step has been replaced.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> list(decay_factors(torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)).values())
        [0.95]
        >>> decay_factors(torch.optim.SGD([weight], lr=0.1, weight_decay=0.5))
        {}
    """
    every = steppers(optimizer)
    if not all(map(_steps_as_its_type, every)):
        return {}
    factors: dict[int, float] = {}
    for each in every:
        if type(each) not in _KNOWN:
            continue
        for group in each.param_groups:
            factor, rate, decay = 1.0, group["lr"], group.get("weight_decay", 0.0)
            if isinstance(decay, Tensor):
                continue
            if decay:
                decoupled = type(each) in _DECOUPLED or group.get("decoupled_weight_decay", False)
                if not decoupled or (isinstance(rate, Tensor) and rate.device.type != "cpu"):
                    continue
                factor = float(1 - rate * decay)
            factors |= {id(parameter): factor for parameter in group["params"]}
    return factors


def _steps_as_its_type(optimizer: Optimizer) -> bool:
    """Whether its step is its type's; torch's schedulers set one on the instance that counts the calls and no more."""
    step = vars(optimizer).get("step")
    counted = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is None or counted
