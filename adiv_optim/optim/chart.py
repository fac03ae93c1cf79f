"""Coordinates of parameters, and the maps that lead there and back."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ..attach.coverage import Coverage


class Known(NamedTuple):
    """What is known of the optimizer's step on a map's parameters.

    Args:
        kept: of each parameter the factor c of a step w ← c w + Δ with a Δ that is free of w; see `kept_by_step`.
            1 where it is not known, and Δ is all that the step changes.
        from_zero: whether no one reads the weights meanwhile, so that they are 0 instead.
    """

    kept: Sequence[float]
    from_zero: bool = False


class Map(ABC):
    """The change of coordinates of a few parameters, for one step.

    `Coordinates` keeps the parameters' values and gradients from before `enter`, and gives them back whatever happens:
    a map may fail anywhere.
    """

    #: The parameters that the optimizer is to see in other coordinates.
    parameters: Sequence[nn.Parameter]
    #: Whether the weights are written in the new coordinates, or the gradients alone.
    moves_weights: ClassVar[bool] = True

    @abstractmethod
    def enter(self, weights: Sequence[Tensor], known: Known) -> None:
        """Write the parameters, unless they are 0, and give them new gradients, in the new coordinates.

        Where they are 0, what is in them after the step is the step alone.

        Args:
            weights: the parameters' values.
            known: what is known of the optimizer's step.
        """

    def partial(self, weights: Sequence[Tensor], known: Known) -> Tensor:
        """Return what `leave` must know of all rows, for those held here: float64, to be added up in place."""
        raise NotImplementedError

    @abstractmethod
    def leave(self, weights: Sequence[Tensor], known: Known) -> None:
        """Let the parameters be `weights` and the step that was taken, mapped back.

        Where the step changed nothing the weight must be bit for bit what it was.

        Args:
            weights: the parameters' values as `enter` was given them.
            known: as `enter` was given it.
        """


class Chart(ABC):
    """Coordinates for a model's parameters, measured anew as training goes on."""

    #: What may be done about a checkpoint that does not fit.
    remedy = "load what was saved of the same model with the same settings, or leave 'chart' out to measure anew"

    @abstractmethod
    def maps(self) -> Iterable[Map]:
        """Return the maps of this step. Parameters that none of them touches take the plain step."""

    def settle(self, maps: Mapping[Map, tuple[Sequence[Tensor], Known]]) -> None:  # noqa: B027 — most charts have nothing to do
        """Called after the optimizer's step, before any map's `leave`: what processes must agree on first.

        Args:
            maps: this step's, each with what its `leave` will be given.
        """

    def after_step(self) -> None:  # noqa: B027 — most charts have nothing to do
        """Called when a step has been taken and the weights are the user's again."""

    @abstractmethod
    def coverage(self) -> Coverage:
        """Say of every trainable parameter how it is treated, or why it is not."""

    def measured_parameters(self) -> Collection[int] | None:
        """The ids of the parameters that `coverage` speaks of; None is whatever has the names now."""
        return None

    def why_inactive(self) -> str:
        """Say, after the second step, why nothing has been treated so far, with the remedy; "" if something has."""
        return ""

    def metrics(self) -> dict[str, float]:
        """Return what was measured last, as scalars for a logger."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return what it was built with, as the wrapper's repr shows it."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what the chart remembers from step to step, for a checkpoint."""
        return {}

    def check_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 — most charts take any
        """Raise a ValueError if the state cannot be loaded as it is; nothing is loaded then."""

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 — most charts remember nothing
        """Take from a checkpoint what the chart remembers; an empty one makes it forget."""


class Detached(Chart):
    """The model's own coordinates, once others have been given up."""

    def maps(self) -> Iterable[Map]:
        """Return none: every parameter takes the plain step."""
        return ()

    def coverage(self) -> Coverage:
        """Say nothing of any parameter; `Coordinates.coverage` fills in the reason."""
        return Coverage()

    def settings(self) -> dict[str, Any]:
        """Return that there are none any more."""
        return {"detached": True}
