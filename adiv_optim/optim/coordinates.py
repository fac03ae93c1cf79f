"""Letting an optimizer step in other coordinates than those the model's weights are written in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .wrapper import OptimizerWrapper, check_same_parameters

#: What to do where parameters are sharded: changing coordinates takes whole weights.
UNSHARDED = "use DistributedDataParallel, or GradientOnly, which goes with fully_shard"


class Map(ABC):
    """The change of coordinates of a few parameters, for one step: in place, and undone exactly.

    `enter` writes the parameters and their gradients in the new coordinates; `leave`, after the optimizer's step,
    gives every weight w + (what the step changed, mapped back). A step that changed nothing, or raised before it
    did, must leave w bit for bit. An `enter` that raises must have changed no weight.
    """

    @abstractmethod
    def enter(self) -> None:
        """Write parameters and gradients in the new coordinates."""

    @abstractmethod
    def leave(self) -> None:
        """Write parameters and gradients in the model's own coordinates, with the step that was taken."""


class Chart(ABC):
    """Coordinates for a model's parameters, measured anew as training goes on."""

    #: What may be done about a checkpoint that does not fit.
    remedy = "load what was saved of the same model with the same settings, or leave 'chart' out to measure anew"

    @abstractmethod
    def maps(self) -> Iterable[Map]:
        """Return the maps of this step. Parameters that none of them touches take the plain step."""

    def after_step(self) -> None:  # noqa: B027 — most charts have nothing to do
        """Called when a step has been taken and the weights are the user's again."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the chart remembers from step to step, for a checkpoint."""
        return {}

    def check_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 — most charts take any
        """Raise a ValueError if the state cannot be loaded as it is; nothing is loaded then."""

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 — most charts remember nothing
        """Take from a checkpoint what the chart remembers; an empty one makes it forget."""


class Coordinates(OptimizerWrapper):
    """An optimizer that steps in the coordinates of a chart; its state lives there too.

    The weights are mapped in place around the inner `step` and are the user's own outside of it; an exception
    inside puts them back. The inner optimizer may read p and p.grad and nothing else of the model. Gradients are
    mapped back as well, to rounding.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS.
        model: the model whose parameters it steps on.
        chart: the coordinates.

    Raises:
        TypeError: not an optimizer, or LBFGS.
        ValueError: the optimizer holds no parameter of the model, or changes coordinates itself.
    """

    chart: Chart

    def __init__(self, optimizer: Optimizer, model: nn.Module, chart: Chart) -> None:
        super().__init__(optimizer)
        check_same_parameters(type(self).__name__, optimizer, model)
        within: Optimizer | None = optimizer
        while isinstance(within, OptimizerWrapper):
            if isinstance(within, Coordinates):
                raise ValueError(
                    f"{type(self).__name__} around {type(within).__name__}: both change coordinates, and the inner one "
                    "would measure weights that the outer one has mapped; choose one."
                )
            within = within.inner
        self.model, self.chart = model, chart

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: as in torch, no hooks."""
        return {**super().__getstate__(), "model": self.model, "chart": self.chart}

    @torch.compiler.disable  # it measures, and does what it finds: traced, a step would be dozens of graphs
    @torch.no_grad()
    def _inner_step(self) -> None:
        with ExitStack() as entered:  # leaves every map, also if another one fails to
            for map_ in list(self.chart.maps()):
                map_.enter()
                entered.callback(map_.leave)
            super()._inner_step()
        self.chart.after_step()

    def _of_two_weights(self, name: str) -> Callable[[], Any]:
        super()._of_two_weights(name)
        raise AttributeError(
            f"{type(self).__name__} has no {name}(): {type(self.inner).__name__} keeps its second set of weights in "
            "the coordinates of the steps it took, and would mix them with the model's own; wrap it in GradientOnly."
        )

    def _state_dict(self) -> dict[str, Any]:
        remembered = self.chart.state_dict()
        inner = super()._state_dict()
        return {**inner, "chart": remembered} if remembered else inner

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        remembered = state_dict.get("chart", {})
        if "chart" in state_dict:
            self.chart.check_state_dict(remembered)
        super()._load_state_dict({name: value for name, value in state_dict.items() if name != "chart"})
        self.chart.load_state_dict(remembered)
