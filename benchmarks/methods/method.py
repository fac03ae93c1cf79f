"""What a method is: how it builds its network, and what it does to gradient and coordinates."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_optim.corrections import BatchIdeal, Correction
from adiv_optim.gauge import Gauge
from adiv_optim.optim import GradientOnly, UnitConsistent


class Search(NamedTuple):
    """Rates and dampings that a comparison tries within each of some normalisers or optimizers, and more such pairs."""

    study: str
    within: tuple[str, ...]
    rates: tuple[float, ...]
    dampings: tuple[float, ...] = (1.0,)
    more: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Method:
    """One row of a comparison."""

    label: str = ""  # what tables and figures call it
    color: str = "black"
    linear: Callable[[int, int], nn.Module] = nn.Linear
    convolution: Callable[..., nn.Module] = nn.Conv2d
    #: Shape of a sample → the parameterless normaliser before every affine layer and convolution, the first included.
    normalizer: Callable[[tuple[int, ...]], nn.Module] | None = None
    correction: Correction | None = None  # what the optimizer's side does to the gradient
    lr_factor: float = 1.0  # of the protocol's learning rate
    gauge: Gauge | None = None  # whose coordinates the optimizer steps in
    #: An optimizer that is measured by what layers read; trained by plain loops, whose forward passes it sees.
    by_inputs: Callable[..., Any] | None = None
    #: Of a language model, a key of `language.OPTIMIZERS`; networks for images have that of their protocol. Or what
    #: takes the place of either, a function of parameters, lr and weight_decay: torch.optim.RMSprop, say.
    optimizer: str | Callable[..., Any] | None = None
    studies: str = ""  # names of the comparisons that it is in; see `having`
    searches: tuple["Search", ...] = ()  # what its rate and damping are chosen from, by comparisons that search grids

    @property
    def applies(self) -> str:
        """What it trains: networks for "images", a "language" model, or both."""
        return "images language" if callable(self.optimizer) else "language" if self.optimizer else "images"

    @property
    def damped(self) -> bool:
        """Whether the method has a damping."""
        by_inputs = self.by_inputs and signature(self.by_inputs).parameters
        return isinstance(self.correction, BatchIdeal) or "damping" in (by_inputs or ())

    def with_damping(self, damping: float | None) -> "Method":
        """The method with another damping, or as it is."""
        if damping is None:
            return self
        if isinstance(self.correction, BatchIdeal):
            return replace(self, correction=replace(self.correction, damping=damping))
        return replace(self, by_inputs=self.by_inputs and partial(self.by_inputs, damping=damping))

    def wrap(self, optimizer: Optimizer, model: nn.Module, example: Tensor) -> Optimizer:
        """Put the method's correction or coordinates around an optimizer."""
        if self.correction is not None:
            return GradientOnly(optimizer, model, self.correction)
        if self.by_inputs is not None:
            return self.by_inputs(optimizer, model)
        if self.gauge is not None:
            return UnitConsistent(optimizer, model, gauge=self.gauge, example_input=example)
        return optimizer

    def normalizers(self, shape: tuple[int, ...]) -> list[nn.Module]:
        """Return the normaliser for samples of a shape, if the method has one."""
        return [self.normalizer(shape)] if self.normalizer else []

    def affine(self, inputs: int, outputs: int) -> list[nn.Module]:
        """Return an affine layer behind the normaliser, if the method has one."""
        return [*self.normalizers((inputs,)), self.linear(inputs, outputs)]
