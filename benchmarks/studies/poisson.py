"""Physics-informed networks: a differential equation solved by a network of its coordinates, in float64.

The problem and the network are those of KFAC for PINNs (Dangel et al. 2024, arXiv 2405.15603). Each arm's learning
rate (and damping) come from ten trials of half the time, on points and by a seed that no table shows.
"""

import argparse
import math
import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.progress import Kind, add_progress_arguments, run_all
from ..core.store import Store
from ..core.study import Sections, Study
from ..core.tune import tune
from ..fields.report import Look, sections
from ..fields.run import FieldRun, Problem, final_error, results
from ..methods import METHODS

WIDTHS = (2, 64, 64, 48, 48, 1)
INNER, BOUNDARY, TEST = 900, 120, 9000
POINTS = ("fixed", "drawn")
#: Of the heat equation.
CONDUCTIVITY = 0.25


@dataclass(frozen=True)
class EquationRun(FieldRun):
    """One network, by one seed."""

    equation: str = "poisson"
    points: str = "fixed"  # "fixed", or "drawn" anew at every step

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check((), equation=EQUATIONS, points=POINTS)


def derivatives(u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient and the pure second derivatives of u by x, row by row, by two reverse passes."""
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [torch.autograd.grad(part.sum(), x, create_graph=True)[0][:, k] for k, part in enumerate(first.unbind(-1))]
    return first, torch.stack(second, -1)


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

    def loss(self, model: nn.Module) -> Tensor:
        """Half the mean squared residual inside, and half the mean squared error on the sides."""
        inner, sides = self.draw() if self.run.points == "drawn" else (self.inner, self.sides)
        x = inner.clone().requires_grad_()
        residual = self.residual(x, model(x).squeeze(-1))
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

    @abstractmethod
    def residual(self, x: Tensor, u: Tensor) -> Tensor:
        """How far u is from solving the equation, for each row of x."""


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

    def residual(self, x: Tensor, u: Tensor) -> Tensor:
        """Return Δu + f."""
        _, second = derivatives(u, x)
        return second.sum(-1) + 2 * math.pi**2 * self.solution(x.detach())


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

    def residual(self, x: Tensor, u: Tensor) -> Tensor:
        """Return ∂u/∂t − ¼ ∂²u/∂x²."""
        first, second = derivatives(u, x)
        return first[:, 1] - CONDUCTIVITY * second[:, 0]


EQUATIONS: dict[str, type[Equation]] = {"poisson": Poisson, "heat": Heat}


def _problem(run: EquationRun) -> Problem:
    return EQUATIONS[run.equation](run)


#: A run of so many seconds takes about this many steps in each.
_PACE = 25
PINNS = Kind(
    load=lambda run, download: None,
    steps=lambda run, data: run.steps or round(_PACE * run.seconds),
    family=lambda run: run,
    train=results(_problem),
    score=final_error,
    alike=lambda run: (run.equation, run.points, run.optimizer, run.method, run.every),
)

#: Optimizer, wrapper, and the steps between measurements where they are not the wrapper's own.
Arm = tuple[str, str, int | None]
STARTS = {"adam": 1e-2, "muon": 3.2e-2, "soap": 3.2e-2, "momentum": 1e-2, "lbfgs": 1.0}
DAMPING = 3.2e-3
MAIN: list[Arm] = [
    ("soap", "whitened", None), ("soap", "none", None), ("muon", "whitened", None), ("muon", "none", None),
    ("adam", "whitened", None), ("adam", "none", None), ("lbfgs", "none", None),
]  # fmt: skip
OTHERS: list[Arm] = [("muon", "preconditioned", None), ("momentum", "preconditioned", None)]
OFTEN: list[Arm] = [(optimizer, "whitened", every) for every in (3, 1) for optimizer in ("soap", "muon")]
#: The arms of each protocol, (equation, points, seconds or steps), most valuable first.
PROTOCOLS: dict[tuple[str, str, float | int], Sequence[Arm]] = {
    ("poisson", "fixed", 60.0): [*MAIN, *OTHERS, *OFTEN],
    ("heat", "fixed", 60.0): MAIN,
    ("poisson", "drawn", 60.0): MAIN,
    ("poisson", "fixed", 2000): MAIN[:-1],
}


def _cell(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return f"{10**middle:.2g} ({10**low:.2g} to {10**high:.2g})"


_LOOK = Look(
    math.log10,
    _cell,
    "relative L2 error",
    lambda difference: f"× {10**difference:.2f}",
    logarithmic=True,
    about="Relative L2 error over 9,000 points, median and quartiles over seeds, each with a network and points of its "
    "own. Learning rate and damping are the best of an arm's trials of half the length. Differences are ratios of "
    "geometric means, p of the paired t test of logarithms. Learning rates rise over 20 steps and fall to 0 by a "
    "cosine; LBFGS (history 50, strong Wolfe) keeps its own. Muon trains the inner matrices, Adam the rest.",
)


def _named(settings: Mapping[str, Any]) -> tuple[str, str]:
    length = f"{settings['seconds']:g} seconds of one core" if "seconds" in settings else f"{settings['steps']} steps"
    how = "points that stay" if settings["points"] == "fixed" else "points drawn anew at every step"
    equation = {"poisson": "Poisson's equation in two dimensions", "heat": "the heat equation in one dimension"}
    suffix = f"{settings['equation']}-{settings['points']}" + "-steps" * ("steps" in settings)
    return suffix, f"{equation[settings['equation']]}, {how}, {length}"


def report(store: Store, name: str, folder: Path) -> Sections:
    """A section for every equation, way of drawing points, and length."""
    return sections(store, name, folder, _LOOK, _named, lambda arm: arm[1:] in MAIN)


def limit(length: float | int, share: float = 1.0) -> dict[str, Any]:
    """Seconds, or steps where the length is a whole number."""
    if isinstance(length, int):
        return {"steps": max(1, round(share * length)), "seconds": None}
    return {"steps": None, "seconds": share * length}


def _run(options: argparse.Namespace, store: Store) -> None:
    for (equation, points, length), arms in PROTOCOLS.items():
        if options.equation not in (None, equation) or options.points not in (None, points):
            continue
        whole = options.steps or length
        like = EquationRun("", "none", equation=equation, points=points, **limit(whole, 0.5))
        for optimizer, method, every in arms:
            damping = DAMPING if METHODS[method].damped else None
            own: dict[str, Any] = {"optimizer": optimizer, "method": method, "every": every, "damping": damping}
            (chosen,) = tune(
                [replace(like, lr=STARTS[optimizer], **own)], PINNS, store, math.log, trials=options.trials
            )
            seeds = range(1, options.seeds + 1)
            run_all([replace(chosen, seed=seed, **limit(whole)) for seed in seeds], PINNS, store)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--equation", choices=EQUATIONS, help="this one alone")
    parser.add_argument("--points", choices=POINTS, help="these alone: fixed, or drawn anew at every step")
    parser.add_argument("--trials", type=int, default=10, help="that choose an arm's learning rate and damping")
    parser.add_argument("--seeds", type=int, default=5, help="how many; they begin at 1")
    parser.add_argument("--steps", type=int, help="in place of each protocol's own length")
    add_progress_arguments(parser)


STUDIES = {"poisson": Study("physics-informed networks: Poisson's and the heat equation", _run, report, _arguments)}
