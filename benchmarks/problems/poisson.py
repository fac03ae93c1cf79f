"""Differential equations solved by a network of their coordinates, in float64; the error is the relative L2 one.

Problem and network are those of KFAC for PINNs (Dangel et al. 2024, arXiv 2405.15603). Derivatives are carried forward
with the values.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..train import FieldRun, Problem, kind_of

WIDTHS = (2, 64, 64, 48, 48, 1)
INNER, BOUNDARY, TEST = 900, 120, 9000
POINTS = ("fixed", "drawn")
DERIVATIVES = "derivatives"
#: `count_rows` of an optimizer.
CountRows = Callable[[nn.Module, Tensor], None]
#: Of the heat equation.
CONDUCTIVITY = 0.25


@dataclass(frozen=True)
class EquationRun(FieldRun):
    """One network, by one seed."""

    equation: str = "poisson"
    points: str = "fixed"  # "fixed", or "drawn" anew at every step
    rows: str | None = None  # "derivatives": they count beside the inputs

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check((), equation=EQUATIONS, points=POINTS, rows=(None, DERIVATIVES))


def carried(
    model: nn.Module, x: Tensor, weights: Sequence[float], count: CountRows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry derivatives by x forward through a tanh network, beside the values u.

    Args:
        model: linear layers and tanh.
        x: (n, d).
        weights: d numbers c.
        count: is given every linear layer with the rows of derivatives that it multiplies.

    Returns:
        u (n,), its gradient (n, d), and Σₖ cₖ ∂²u/∂xₖ² (n,).
    """
    first = torch.eye(x.shape[-1], dtype=x.dtype).expand(len(x), -1, -1)
    second, c = torch.zeros_like(x), torch.tensor(weights, dtype=x.dtype).view(-1, 1)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            rows = torch.cat([first, second.unsqueeze(1)], 1)
            if count is not None:
                count(layer, rows)
            rows = F.linear(rows, layer.weight)
            x, first, second = layer(x), rows[:, :-1], rows[:, -1]
        else:
            x = layer(x)
            slope = 1 - x.square()
            second = slope * (second - 2 * x * (c * first.square()).sum(1))
            first = slope.unsqueeze(1) * first
    return x.squeeze(-1), first.squeeze(-1), second.squeeze(-1)


class Equation(Problem):
    """A network that solves an equation on the unit square, with values given on some of its sides."""

    def __init__(self, run: EquationRun) -> None:
        self.run, self.generator = run, torch.Generator().manual_seed(run.seed)
        self.inner, self.sides = self.draw()
        test = torch.rand(TEST, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(-1))
        self.test, self.truth = test, self.solution(test)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Draw points inside and on the sides."""
        inner, sides = (
            torch.rand(count, 2, dtype=torch.float64, generator=self.generator) for count in (INNER, BOUNDARY)
        )
        return inner, self.on_sides(sides)

    def model(self, run: EquationRun) -> nn.Module:
        """Draw the tanh network."""
        torch.manual_seed(run.seed)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(WIDTHS):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).double()

    def loss(self, model: nn.Module, optimizer: Any) -> Tensor:
        """Half the mean squared residual inside, and half the mean squared error on the sides."""
        inner, sides = self.draw() if self.run.points == "drawn" else (self.inner, self.sides)
        count = optimizer.count_rows if self.run.rows == DERIVATIVES else None
        _, first, second = carried(model, inner, self.weights, count)
        residual = self.residual(inner, first, second)
        wrong = model(sides).squeeze(-1) - self.solution(sides)
        return (residual.square().mean() + wrong.square().mean()) / 2

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """The relative L2 error over 9,000 points."""
        wrong = model(self.test).squeeze(-1) - self.truth
        return (wrong.norm() / self.truth.norm()).item()

    @abstractmethod
    def on_sides(self, points: Tensor) -> Tensor:
        """Move points of the square onto the sides on which values are given."""

    @abstractmethod
    def solution(self, points: Tensor) -> Tensor:
        """The true solution, which gives the values on the sides and judges the network."""

    @property
    @abstractmethod
    def weights(self) -> Sequence[float]:
        """Of the second derivatives, in the sum that the equation holds."""

    @abstractmethod
    def residual(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """How far a function with this gradient and sum of second derivatives is from solving the equation."""


class Poisson(Equation):
    """−Δu = 2π² sin πx sin πy with u = 0 on all sides, which sin πx sin πy solves."""

    def on_sides(self, points: Tensor) -> Tensor:
        """A quarter of the points on each side."""
        place = torch.arange(len(points))
        points[place, place % 2] = (place % 4 // 2).double()
        return points

    def solution(self, points: Tensor) -> Tensor:
        """Return sin πx sin πy."""
        return (math.pi * points).sin().prod(-1)

    weights = (1.0, 1.0)

    def residual(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return Δu + f."""
        return second + 2 * math.pi**2 * self.solution(x)


class Heat(Equation):
    """∂u/∂t = ¼ ∂²u/∂x², u = sin πx at t = 0 and 0 at both ends, which e^(−π²t/4) sin πx solves; inputs are (x, t)."""

    def on_sides(self, points: Tensor) -> Tensor:
        """A third of the points at each end, a third at the beginning."""
        place = torch.arange(len(points))
        third = place % 3
        points[place, torch.where(third == 2, 1, 0)] = (third == 1).double()
        return points

    def solution(self, points: Tensor) -> Tensor:
        """Return e^(−π²t/4) sin πx."""
        x, t = points.unbind(-1)
        return (-CONDUCTIVITY * math.pi**2 * t).exp() * (math.pi * x).sin()

    weights = (CONDUCTIVITY, 0.0)

    def residual(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return ∂u/∂t − ¼ ∂²u/∂x²."""
        return first[:, 1] - second


EQUATIONS: dict[str, type[Equation]] = {"poisson": Poisson, "heat": Heat}


PINNS = kind_of(lambda run: EQUATIONS[run.equation](run), pace=60)
