"""The two parts of a mapped optimizer, without code: measurements of a model, and a change of variables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ..rows.coverage import Coverage
from .layer_inputs import LayerInputs
from .roots import RightFactor
from .step import Rescale, Stack


class ChangeOfVariables(NamedTuple):
    """The variables that an optimizer steps in, by functions without a memory.

    Args:
        factors: covariance → R, block by block, or a NoRootError.
        treatment: (covariance, R or None) → in words, how a layer is treated.
        metrics: layers → numbers for a logger.
        rescale: (norms of steps, their norms mapped back) → the factors of the steps; None is 1.
        moves_weights: whether weights are mapped too, or gradients alone.
        why_bias_is_plain: why a bias is not treated with its weight, or "" if it is.
        holds: whether W' and not W is kept where R, a number, is measured anew.
    """

    factors: Callable[[Any], Sequence[RightFactor]]
    treatment: Callable[[Any, Any], str]
    metrics: Callable[[Sequence[LayerInputs]], dict[str, float]]
    rescale: Rescale | None = None
    moves_weights: bool = True
    why_bias_is_plain: str = ""
    holds: bool = False


class Watching(Protocol):
    """Measurements of a model, and the stacks of parameters that follow from them."""

    model: nn.Module
    #: Steps so far.
    steps: int
    #: The layers whose forward passes are watched.
    layers: Sequence[LayerInputs] = ()
    #: Whether weights are mapped too, or gradients alone.
    moves_weights: bool = True

    def find(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Look at the parameters of the optimizer, by its parameter groups, if they have changed."""

    def stacks(self) -> Sequence[Stack]:
        """Measure if that is due, and return this step's stacks; other parameters take the plain step."""

    def count_step(self) -> None:
        """Count a step; the weights are the user's again."""

    def why_inactive(self) -> str:
        """Say, after the second step, why nothing has been treated so far, with the remedy; "" if something has."""
        return ""

    def metrics(self) -> dict[str, float]:
        """Return the last measurements, as scalars for a logger."""

    def coverage(self) -> Coverage:
        """Say of every parameter that was looked at how it is treated, or why it is not."""

    def remembered(self) -> Mapping[Tensor, dict[str, Any]]:
        """Return the memory of each parameter, with the same names and shapes before and after training."""

    def load(self, remembered: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take the memory of some parameters from a checkpoint, and forget that of others."""
