"""Differential equations solved by a network of their coordinates, in float64; the error is the relative L2 one.

Problem and network are those of KFAC for PINNs (Dangel et al. 2024, arXiv 2405.15603).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..train import DERIVATIVES, FieldRun, Problem, carried, kind_of, perceptron

WIDTHS, INNER, BOUNDARY, TEST = (2, 64, 64, 48, 48, 1), 900, 120, 9000


class Equation(NamedTuple):
    """An equation on the unit square whose solution is known, with its values given on some of the sides."""

    solution: Callable[[Tensor], Tensor]  # points → values
    sides: Sequence[tuple[int, int]]  # (coordinate, its value there), each with as many points
    weights: Sequence[float]  # of the second derivatives, in the sum that the equation holds
    residual: Callable[[Tensor, Tensor, Tensor], Tensor]  # (the solution, a network's gradient and that sum) → error


EQUATIONS = {
    # −Δu = 2π² sin πx sin πy with u = 0 on all sides, which sin πx sin πy solves.
    "poisson": Equation(
        solution=lambda points: (math.pi * points).sin().prod(-1),
        sides=[(0, 0), (1, 0), (0, 1), (1, 1)],
        weights=(1.0, 1.0),
        residual=lambda u, first, second: second + 2 * math.pi**2 * u,
    ),
    # ∂u/∂t = ¼ ∂²u/∂x², u = sin πx at t = 0 and 0 at both ends, which e^(−π²t/4) sin πx solves; points are (x, t).
    "heat": Equation(
        solution=lambda points: (-0.25 * math.pi**2 * points[:, 1]).exp() * (math.pi * points[:, 0]).sin(),
        sides=[(0, 0), (0, 1), (1, 0)],
        weights=(0.25, 0.0),
        residual=lambda u, first, second: first[:, 1] - second,
    ),
}


@dataclass(frozen=True)
class EquationRun(FieldRun):
    """One network, by one seed."""

    equation: str = "poisson"
    points: str = "fixed"  # "fixed", or "drawn" anew at every step
    rows: str | None = None  # "derivatives": they count beside the inputs

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check((), equation=EQUATIONS, points=("fixed", "drawn"), rows=(None, DERIVATIVES))


class Solver(Problem):
    """A tanh network that solves an equation."""

    def __init__(self, run: EquationRun) -> None:
        self.run, self.generator, self.equation = run, torch.Generator().manual_seed(run.seed), EQUATIONS[run.equation]
        self.inner, self.sides = self.draw()
        self.test = torch.rand(TEST, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(-1))

    def draw(self) -> tuple[Tensor, Tensor]:
        """Draw points inside and on the sides."""
        inner, sides = (torch.rand(n, 2, dtype=torch.float64, generator=self.generator) for n in (INNER, BOUNDARY))
        given = torch.tensor(self.equation.sides).repeat(BOUNDARY // len(self.equation.sides), 1)
        return inner, sides.scatter(1, given[:, :1], given[:, 1:].double())

    def model(self) -> nn.Module:
        """Draw the network."""
        torch.manual_seed(self.run.seed)
        return nn.Sequential(*perceptron(WIDTHS, activation=nn.Tanh)).double()

    def loss(self, model: nn.Module, optimizer: Any) -> Tensor:
        """Half the mean squared residual inside, and half the mean squared error on the sides."""
        inner, sides = self.draw() if self.run.points == "drawn" else (self.inner, self.sides)
        count = optimizer.count_rows if self.run.rows == DERIVATIVES else None
        _, first, second = carried(model, inner, self.equation.weights, count)
        residual = self.equation.residual(self.equation.solution(inner), first[:, 0], second[:, 0])
        wrong = model(sides).squeeze(-1) - self.equation.solution(sides)
        return (residual.square().mean() + wrong.square().mean()) / 2

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """The relative L2 error over 9,000 points."""
        truth = self.equation.solution(self.test)
        return ((model(self.test).squeeze(-1) - truth).norm() / truth.norm()).item()


PINNS = kind_of(Solver, pace=60)
