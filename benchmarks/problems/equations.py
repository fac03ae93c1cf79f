"""Nonlinear equations in x and t, solved by a network in float64; one residual serves a point and a batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adiv_optim.jacobian import derivatives

from ..train import DERIVATIVES, FieldRun, Problem, carried, kind_of, perceptron

#: Points inside → on the sides, drawn anew at every step.
POINTS = {300: 60, 600: 100}


class Equation(NamedTuple):
    """An equation in (x, t) whose solution is known, with its values given on some of the sides."""

    solution: Callable[[Tensor], Tensor]  # points (…, 2) → values (…)
    domain: Sequence[tuple[float, float]]  # from where to where, of every coordinate
    sides: list[tuple[int, float]]  # (coordinate, its value there), in turn
    residual: Callable[[Tensor, Tensor, Tensor], Tensor]  # (u, gradient, a sum of second derivatives)
    weights: Sequence[float] = (0.0, 0.0)  # of the second derivatives in that sum
    factor: float = 1.0  # of errors on the sides


EQUATIONS = {
    # Burgers: ∂u/∂t + u ∂u/∂x = ν ∂²u/∂x² with ν = 0.05, which the wave 1 − tanh((x − t)/2ν) solves.
    "burgers": Equation(
        solution=lambda points: 1 - ((points[..., 0] - points[..., 1]) / 0.1).tanh(),
        domain=[(-1.0, 1.0), (0.0, 1.0)],
        sides=[(0, -1.0), (0, 1.0), (1, 0.0)],
        weights=(0.05, 0.0),
        residual=lambda u, first, second: first[..., 1] + u * first[..., 0] - second,
        factor=10.0,
    ),
    # Reaction: ∂u/∂t = 5u(1 − u), h = e^(−8(x/π − 1)²) at t = 0, which σ(5t − ln(1/h − 1)) solves; it needs no side.
    "reaction": Equation(
        solution=lambda at: (5 * at[..., 1] - (8 * (at[..., 0] / math.pi - 1).square()).expm1().log()).sigmoid(),
        domain=[(0.0, 2 * math.pi), (0.0, 1.0)],
        sides=[(1, 0.0)],
        residual=lambda u, first, second: first[..., 1] - 5 * u * (1 - u),
    ),
}


@dataclass(frozen=True)
class NonlinearRun(FieldRun):
    """One network, by one seed."""

    lr: float | None = None  # GaussNewton has none
    equation: str = "burgers"
    width: int = 50  # of three hidden layers
    inner: int = 300  # points inside
    rows: str | None = None  # "derivatives": they count beside the inputs

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(("width",), equation=EQUATIONS, inner=POINTS, rows=(None, DERIVATIVES))


class Solver(Problem):
    """A tanh network that solves an equation."""

    def __init__(self, run: NonlinearRun) -> None:
        self.run, self.generator, self.equation = run, torch.Generator().manual_seed(run.seed), EQUATIONS[run.equation]
        self.test = self.draw(9000, torch.Generator().manual_seed(-1))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw points of the domain."""
        low, high = torch.tensor(self.equation.domain, dtype=torch.float64).T
        return low + (high - low) * torch.rand(count, 2, dtype=torch.float64, generator=generator)

    def points(self) -> tuple[Tensor, Tensor]:
        """Draw points inside and on the sides."""
        inner, sides = (self.draw(n, self.generator) for n in (self.run.inner, POINTS[self.run.inner]))
        given = torch.tensor(self.equation.sides * (len(sides) // len(self.equation.sides) + 1))[: len(sides)].double()
        return inner, sides.scatter(1, given[:, :1].long(), given[:, 1:])

    def model(self) -> nn.Module:
        """Draw the network by Xavier's initialisation."""
        torch.manual_seed(self.run.seed)
        model = nn.Sequential(*perceptron((2, *[self.run.width] * 3, 1), activation=nn.Tanh)).double()
        for parameter in model.parameters():
            nn.init.xavier_normal_(parameter) if parameter.dim() > 1 else nn.init.zeros_(parameter)
        return model

    def loss(self, model: nn.Module, optimizer: Any) -> Tensor:
        """Half the mean squared residual inside, and half the mean squared error on the sides times its factor."""
        inner, sides = self.points()
        count = optimizer.count_rows if self.run.rows == DERIVATIVES else None
        residual = self.equation.residual(*carried(model, inner, self.equation.weights, count))
        wrong = self._on_the_sides(model, sides, self.equation.solution(sides))
        return (residual.square().mean() + wrong.square().mean()) / 2

    def terms(self) -> list[Any]:
        """The same loss by its terms."""
        inner, sides = self.points()
        return [(self._inside, inner), (self._on_the_sides, sides, self.equation.solution(sides))]

    def _inside(self, model: nn.Module, point: Tensor) -> Tensor:
        u, first, second = (each[0] for each in derivatives(model, point))
        return self.equation.residual(u, first, second @ second.new_tensor(self.equation.weights))

    def _on_the_sides(self, model: nn.Module, point: Tensor, value: Tensor) -> Tensor:
        return self.equation.factor * (model(point)[..., 0] - value)

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """The relative L2 error over 9,000 points."""
        truth = self.equation.solution(self.test)
        return ((model(self.test).squeeze(-1) - truth).norm() / truth.norm()).item()


SOLVED = kind_of(Solver, pace=20)
