"""The base of wrappers whose inner optimizer steps on reparametrized weights; and whether that optimizer reads them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from .._checks import warn
from .._device import refuse_capture, without_autocast
from ..rows.models import Coverage
from .chained import ChainedOptimizer
from .measurements import Measurements
from .parameters import check_same_parameters, report
from .refusals import checked_step, refuse_kept_weights, refuse_within
from .step import take_step
from .wrapper import OptimizerWrapper

#: These read their state and the gradient, and a weight where it decays and nowhere else; their state holds no weights.
READ_NO_WEIGHTS: set[type[Optimizer]] = {optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax}
READ_NO_WEIGHTS |= {optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Muon, optim.Rprop}
#: Why a layer is left alone in a step: mapping the steps of both would move the one that is to stay.
_HALF_FROZEN = "of a layer's weight and bias one has a learning rate of 0; freeze that by requires_grad_(False)"


class Mapped(OptimizerWrapper):
    """An optimizer that steps on other variables, which `Measurements` of the model give; its moments live there too.

    The weights are mapped in place around the inner `step` and are the user's own outside of it. Where an error, a lack
    of memory or Ctrl-C ends the step early, all gradients and all mapped weights have their old values again. Other
    weights, those of plain steps and all of `Preconditioned`, are as the inner optimizer left them.

    The inner optimizer may read p and p.grad and nothing else of the model. One that is known to read no weights finds
    zeros in their place, and so do its hooks: register those that read or change weights on the wrapper. After the step
    p.grad is the gradient that it was before, or None if the inner optimizer frees it. The inner optimizer's own
    `step()`, called by hand, is a plain step.
    """

    model: nn.Module
    #: The measurements; None once this is detached.
    watch: Measurements | None = None
    #: Steps of this object with gradients, its warnings, and whether it looked for weights in the optimizer's state.
    _steps, _warned, _looked = 0, frozenset[str](), False

    def __init__(self, optimizer: Optimizer, watch: Measurements) -> None:
        name = type(self).__name__
        super().__init__(optimizer)
        check_same_parameters(name, optimizer, watch.model)
        for each in optimizers_in(optimizer):
            refuse_within(name, each)
        if watch.moves_weights:
            refuse_kept_weights(name, self._that_may_read_weights(), {})
        self.model, self.watch = watch.model, watch
        watch.find(self.param_groups)
        coverage = self.coverage().without_frozen_or_skipped()
        if coverage.elements and coverage.element_share < 0.5:
            warn(
                f"{name} treats less than half of the elements of {type(self.model).__name__} that the optimizer "
                f"holds; the others take plain steps: {coverage.reasons()}. {watch.remedy}coverage() lists every "
                "parameter."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "model": self.model, "watch": self.watch}

    def settings(self) -> dict[str, Any]:
        return {"detached": True} if self.watch is None else dict(self.watch.settings)

    @torch.compiler.disable  # traced, a step would be dozens of graphs
    @torch.no_grad()
    def _inner_step(self, **kwargs: Any) -> None:
        step = partial(super()._inner_step, **kwargs)
        if self.watch is None:
            step()
            return
        first = next(self.model.parameters())
        refuse_capture(type(self).__name__, "counts its steps", first)
        self.watch.find(self.param_groups)
        with without_autocast(first.device.type):  # it would round the products
            reason = self._mapped_step(self.watch, step)
        self._steps += any(parameter.grad is not None for parameter in self.model.parameters())
        self.watch.count_step()
        reason = reason or (self.watch.why_inactive() if self._steps == 2 else "")
        if reason and reason not in self._warned:
            self._warned |= {reason}
            warn(f"{type(self).__name__} takes plain steps: {reason}")

    def _mapped_step(self, watch: Measurements, step: Callable[[], Any]) -> str:
        """Step, and say why not every layer was treated, or ""."""
        has_zero_lr_of = {id(p): has_zero_lr(group) for group in self.param_groups for p in group["params"]}
        stacks, reason = [], ""
        for stack in watch.stacks():
            zero_lr = {has_zero_lr_of.get(id(p)) for p in stack.parameters}
            if None in zero_lr:
                continue  # a model may have several optimizers
            if len(zero_lr) == 1 or not stack.moves_weights:
                stack.has_zero_lr = zero_lr == {True}
                stacks.append(stack)
            else:
                reason = _HALF_FROZEN
        first = partial(self._first_step, step) if watch.moves_weights and not self._looked else step
        take_step(stacks, first, decay_factors(self.inner))
        return reason

    def _first_step(self, step: Callable[[], Any]) -> None:
        self._looked = checked_step(type(self).__name__, self._that_may_read_weights(), self.param_groups, step)

    def _that_may_read_weights(self) -> list[Optimizer]:
        """List the optimizers of the step that are neither torch's nor hand it on."""
        known = READ_NO_WEIGHTS | {ChainedOptimizer}
        return [each for each in optimizers_in(self.inner) if type(each) not in known]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; the rows that they have come to do not count any more."""
        super().zero_grad(set_to_none)
        for layer in self.watch.layers if self.watch is not None else ():
            layer.drop_arrived()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer, and measure the layers that it brings."""
        super().add_param_group(param_group)
        if self.watch is not None:
            self.watch.find(self.param_groups)

    def detach(self) -> nn.Module:
        """Return the model, without hooks, and take plain steps from now on.

        The inner optimizer keeps its averages, which are of mapped gradients; to begin anew, build another.
        """
        for layer in self.watch.layers if self.watch is not None else ():
            layer.remove_hooks()
        self.watch = None
        return self.model

    def coverage(self) -> Coverage:
        """Say of every parameter that the optimizer holds how its step is treated, or why it takes the plain one."""
        if self.watch is None:
            return report(self, self.model, Coverage(), "detached")
        unknown = "it, or its name, is newer than the wrapper; wrap the optimizer again"
        return report(self, self.model, self.watch.coverage(), unknown)

    def metrics(self) -> dict[str, float]:
        """Return the last measurements as flat numbers, for any logger, with the treated shares in [0, 1]."""
        return self._metrics(self.coverage(), {} if self.watch is None else self.watch.metrics())

    def _state_dict(self) -> dict[str, Any]:
        plain = super()._state_dict()
        return plain if self.watch is None else self.watch.add_to(plain, self.inner)

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.watch is None:
            super()._load_state_dict(state_dict)
            return
        loaded, rest = self.watch.split_from(state_dict, self.inner)
        super()._load_state_dict(rest)
        self.watch.load_all(loaded, rest, self.inner)


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and those within it that take its step; what a subclass does with them is not known."""
    parts: Sequence[Optimizer] = optimizer.optimizers if type(optimizer) is ChainedOptimizer else ()
    return [optimizer, *(each for part in parts for each in optimizers_in(part))]


def has_zero_lr(group: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a parameter group is 0; one on a device is not waited for."""
    rate = group.get("lr")  # None where the optimizer finds its own, as Adafactor does
    return rate is not None and not (isinstance(rate, Tensor) and rate.device.type != "cpu") and float(rate) == 0


def decay_factors(optimizer: Optimizer) -> dict[int, float]:
    r"""Return by the ids of weights the factor c of a step :math:`w \leftarrow c w + \Delta` whose Δ is free of w.

    It is 1 without weight decay, and 1 − ηλ where that is decoupled. Left out are weights that the step may read
    otherwise: of optimizers that are not torch's own, of a decay that is part of the gradient, of a learning rate on a
    device to be waited for, and of a step that has been replaced.
    """
    every = optimizers_in(optimizer)
    if not all(map(_steps_as_its_type, every)):
        return {}
    factors: dict[int, float] = {}
    for each in every:
        for group in each.param_groups if type(each) in READ_NO_WEIGHTS else ():
            rate, decay = group["lr"], group.get("weight_decay", 0.0)
            is_decoupled = isinstance(each, (optim.AdamW, optim.Muon)) or group.get("decoupled_weight_decay")
            if decay == 0:
                factors |= dict.fromkeys(map(id, group["params"]), 1.0)
            elif is_decoupled and (not isinstance(rate, Tensor) or rate.device.type == "cpu"):
                rate = float(rate) if group.get("fused") else rate  # others round the product as the rate is
                factors |= dict.fromkeys(map(id, group["params"]), float(1 - rate * decay))
    return factors


def _steps_as_its_type(optimizer: Optimizer) -> bool:
    """Whether its step is its type's; torch's schedulers set one on the instance that counts the calls and no more."""
    step = vars(optimizer).get("step")
    counted = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is None or counted
