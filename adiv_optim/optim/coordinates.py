"""Letting an optimizer step in other coordinates than those the model's weights are written in."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._linalg import host
from .._linalg.shards import whole
from ..attach.coverage import Coverage, warn
from ..functional.shared import refuse_capture, without_autocast
from .chart import Chart, Detached, Map
from .checkpoint import DICT, check
from .held import Held
from .reports import fed, gone, report
from .unread import all_who_step, copies_in_state, kept_by_step
from .wrapper import OptimizerWrapper, check_same_parameters

#: Steps after which an optimizer that keeps copies of weights has made them: Lookahead's are six apart.
_SETTLED = 12
#: What to do where FSDP1 has flattened parameters.
UNFLATTENED = "use fully_shard, or GradientOnly, which goes with FSDP1"

#: Why a layer's parameters take the plain step for a while.
_APART = "of weight and bias one has a rate of 0 or no gradient"

#: Where in a state dict coordinates keep what they remember, and what coordinates within them do.
_CHARTS = ("chart", "within")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, whose parameters have other names in DistributedDataParallel and what torch.compile returns."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inside: Any = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        model = inside
    return model


def _at_rest(group: Mapping[str, Any]) -> bool:
    """Whether the rate of a parameter group is 0; on a GPU nobody looks."""
    rate = group.get("lr")
    return rate is not None and not (isinstance(rate, Tensor) and not rate.is_cpu) and float(rate) == 0


@contextmanager
def all_or_nothing(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give tensors that are changed within their old values back if anything goes wrong."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    except BaseException:
        for tensor, value in kept:
            tensor.copy_(value)
        raise


class Coordinates(OptimizerWrapper):
    """An optimizer that steps in the coordinates of a chart; its state lives there too.

    The weights are mapped in place around the inner `step` and are the user's own outside of it. Whatever ends the
    step early, an error, a lack of memory or Ctrl-C, all treated weights then have their old values.
    The inner optimizer may read p and p.grad and nothing else of the model. One that is known to read no weights finds
    zeros in their place. After the step p.grad is the gradient that it was before.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS.
        model: the model whose parameters it steps on.
        chart: the coordinates.

    Raises:
        TypeError: not an optimizer, or LBFGS.
        ValueError: the optimizer holds no parameter of the model, or changes coordinates itself.
    """

    model: nn.Module
    chart: Chart

    def __init__(self, optimizer: Optimizer, model: nn.Module, chart: Chart) -> None:
        super().__init__(optimizer)
        check_same_parameters(type(self).__name__, optimizer, model)
        within: Optimizer | None = optimizer
        while isinstance(within, OptimizerWrapper):
            if isinstance(within, Coordinates) and not self.goes_around(within):
                turned = f"write {type(within).__name__}({type(self).__name__}(…), …)"
                way_out = turned if within.goes_around(self) else "choose one"
                raise ValueError(
                    f"{type(self).__name__} around {type(within).__name__}: the inner one would measure the model in "
                    f"coordinates that the outer one has mapped; {way_out}."
                )
            within = within.inner
        self.__setstate__({**vars(self), "model": unwrapped(model), "chart": chart})

    def goes_around(self, within: "Coordinates") -> bool:
        """Whether an optimizer within may change coordinates as well: only where this one leaves the weights alone."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: as in torch, no hooks."""
        return {**super().__getstate__(), "model": self.model, "chart": self.chart}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a copy or a pickle kept."""
        super().__setstate__(state)
        self._own_steps, self._fed = 0, False
        self._told: set[str] = set()
        #: Ids of parameters that took the plain step last because those of their layer do not move together.
        self._apart: set[int] = set()
        self._stepping = False
        handle = self.inner.register_step_pre_hook(_Watch(self))
        weakref.finalize(self, handle.remove)

    @torch.compiler.disable  # traced, a step would be dozens of graphs
    @torch.no_grad()
    def _inner_step(self) -> None:
        parameter = next(self.model.parameters())
        if not isinstance(self.chart, Detached):
            refuse_capture(type(self).__name__, "counts its steps", parameter)
        if self._makes_state():
            self._step_within()
            return
        # Before the step, which may free gradients. Looking costs a walk over the model, and seldom finds anything.
        self._fed, number = self._fed or fed(self), self._own_steps + 1
        reason = gone(self, self.model, number == 2 and not self._fed) if number & (number - 1) == 0 else ""
        with without_autocast(parameter.device.type):  # it would round the products of maps
            copied = self._step_in_coordinates()
        self.chart.after_step()
        self._own_steps += 1
        if reason or (self._own_steps == 2 and (reason := self.chart.why_inactive())):
            self._tell(reason)
        if self._apart and _APART not in self._told:  # now that the step is taken, if warnings are errors
            self._told.add(_APART)
            names = [name for name, parameter in self.model.named_parameters() if id(parameter) in self._apart]
            warn(f"{type(self).__name__} takes plain steps with {', '.join(names)}: {_APART}, and would be moved too.")
        for key in copied - self._told:
            self._told.add(key)
            inner, own = type(self.inner).__name__, type(self).__name__
            warn(
                f"{inner} keeps a copy of weights in its state, {key!r}, in the coordinates of the step that made it. "
                "An average of such means nothing, and written back, as by Lookahead, it mixes coordinates: put what "
                f"averages or looks ahead around {own}, not inside."
            )

    def _step_within(self) -> None:
        """Let the optimizer within step on what is there; `_Watch` knows this step from one past the wrapper."""
        self._stepping = True
        try:
            super()._inner_step()
        finally:
            self._stepping = False

    def _makes_state(self) -> bool:
        """Whether rates, gradients and state are all nothing, as where torch.distributed.checkpoint takes a step.

        It does so, with gradients of 0, to know the state of an optimizer that has none yet. No row came before it.
        """
        if self.state or not all(map(_at_rest, self.param_groups)):
            return False
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        dense = all(gradient.layout == torch.strided for gradient in gradients)
        return dense and not any(host.read(*(whole(gradient.any()) for gradient in gradients)))

    def _step_in_coordinates(self) -> set[str]:
        """Step, and return what `_copied` does."""
        kept, watched = kept_by_step(self.inner), self._watched()
        waiting = [Held(map_, kept, watched) for map_ in self._maps()]
        copied: set[str] = set()
        try:
            for held in waiting:
                held.enter()
            self._step_within()
            if self._own_steps < _SETTLED:
                copied = self._copied(waiting)
            for held in waiting:
                held.stepped()
            self.chart.settle({held.map: (held.weights, held.known) for held in waiting})
            for held in waiting:
                held.leave()
        except BaseException:
            for held in waiting:
                held.restore()
            raise
        return copied

    def _maps(self) -> list[Map]:
        """Return the maps of this step, of parameters that the optimizer moves together.

        A map mixes the steps of a layer's weight and bias: it would move one that is to stay where it is.
        """
        at_rest = {id(p): _at_rest(group) for group in self.param_groups for p in group["params"]}
        maps: list[Map] = []
        self._apart = set()
        for map_ in self.chart.maps():
            if id(map_.parameters[0]) not in at_rest:
                continue  # where several optimizers train a model, a chart may know weights of another one
            if len({None if p.grad is None else at_rest.get(id(p)) for p in map_.parameters}) == 1:
                maps.append(map_)
            else:
                self._apart.update(map(id, map_.parameters))
        return maps

    def _copied(self, waiting: Iterable[Held]) -> set[str]:
        """Return where the optimizer keeps weights in its state: those are in the coordinates of then."""
        flags = [
            flag
            for held in waiting
            for parameter, weight in zip(held.moving, held.weights, strict=True)
            for flag in copies_in_state(self.inner, parameter, parameter, weight).items()
        ]
        found = host.read(*(flag for _, flag in flags))
        return {key for (key, _), is_copy in zip(flags, found, strict=True) if is_copy}

    def _watched(self) -> bool:
        """Whether the user has hooks on the inner optimizer, which may read all."""
        every = all_who_step(self.inner)
        tables = [
            table for each in every for table in (each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks)
        ]
        return not all(isinstance(hook, _Watch) for table in tables for hook in table.values())

    def _tell(self, reason: str) -> None:
        """Warn, once for each reason, that this wrapper does nothing."""
        if reason not in self._told and not isinstance(self.chart, Detached):
            self._told.add(reason)
            warn(f"{type(self).__name__} takes plain steps: {reason}")

    def settings(self) -> dict[str, Any]:
        """Return what the wrapper was built with, as its repr shows it."""
        return self.chart.settings()

    def coverage(self) -> Coverage:
        """Say of every parameter that the optimizer holds how its step is treated, or why it takes the plain one."""
        found = self.chart.coverage()
        apart = {name: _APART for name, p in self.model.named_parameters() if id(p) in self._apart}
        treated = {name: how for name, how in found.treated.items() if name not in apart}
        found = Coverage(treated, {**found.skipped, **apart}, found.never_seen)
        detached = isinstance(self.chart, Detached)
        unknown = "detached" if detached else "it, or its name, is newer than the wrapper; wrap the optimizer again"
        return report(self, self.model, found, self.chart.measured_parameters(), unknown)

    def detach(self) -> nn.Module:
        """Return the model, and take plain steps from now on."""
        self.chart = Detached()
        return self.model

    def metrics(self) -> dict[str, float]:
        """Return what was measured last as a flat dict of numbers, for any logger."""
        found = self.coverage()
        shares = {"treated_parameters": found.parameter_share, "treated_elements": found.element_share}
        name = type(self).__name__
        own = {f"{name}/{key}": float(value) for key, value in {**shares, **self.chart.metrics()}.items()}
        return {**super().metrics(), **own}

    def _of_two_weights(self, name: str) -> Callable[[], Any]:
        super()._of_two_weights(name)
        raise AttributeError(
            f"{type(self).__name__} has no {name}(): {type(self.inner).__name__} keeps its second set of weights in "
            "the coordinates of the steps it took, and would mix them with the model's own; wrap it in GradientOnly."
        )

    def _state_dict(self) -> dict[str, Any]:
        inner = dict(super()._state_dict())
        # What coordinates within remember goes one level down: both are called "chart".
        within = {name: inner.pop(name) for name in _CHARTS if name in inner}
        remembered = self.chart.state_dict()
        return {**inner, **({"chart": remembered} if remembered else {}), **({"within": within} if within else {})}

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        remembered = state_dict.get("chart", {})
        if "chart" in state_dict:
            self.chart.check_state_dict(remembered)
        within = state_dict.get("within", {})
        check(within, DICT, f"{type(self).__name__}: state_dict['within']", self.chart.remedy)
        rest = {name: value for name, value in state_dict.items() if name not in _CHARTS}
        super()._load_state_dict({**rest, **within})
        self.chart.load_state_dict(remembered)


class _Watch:
    """A hook on the inner optimizer: its own step(), called past the wrapper, is a plain one, which is worth a word."""

    def __init__(self, wrapper: Coordinates) -> None:
        self.wrapper = weakref.ref(wrapper)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        wrapper = self.wrapper()
        if wrapper is not None and not wrapper._stepping:
            wrapper._tell(f"step() of {type(optimizer).__name__} within was called; call the wrapper's own.")
