"""Physics-informed networks: a differential equation solved by a network of its coordinates, in float64.

The problem and the network are those of KFAC for PINNs (Dangel et al. 2024, arXiv 2405.15603). Derivatives are
carried forward with the values. Each arm's learning rate (and damping) come from ten trials of half the length, on
points and by a seed that no table shows; arms of the minute take its settings to 2,000 steps and drawn points as well.
"""

import argparse
import math
import statistics
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.runs import add_progress_arguments, run_all
from ..core.store import Store
from ..core.study import Recipe, Sections, Study
from ..core.table import Cell
from ..core.tune import around, choose
from ..fields.report import Look, sections
from ..fields.run import FieldRun, Problem, kind_of
from ..methods import METHODS

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

#: Optimizer, wrapper, the steps between measurements where they are not the wrapper's own, and which rows count.
Arm = tuple[str, str, int | None, str | None]
STARTS = {"adam": 1e-2, "muon": 3.2e-2, "soap": 3.2e-2, "momentum": 1e-2, "lbfgs": 1.0}
DAMPING = 3.2e-3
MAIN: list[Arm] = [
    ("soap", "whitened", None, DERIVATIVES), ("soap", "none", None, None), ("soap", "whitened", None, None),
    ("muon", "whitened", None, DERIVATIVES), ("muon", "none", None, None), ("muon", "whitened", None, None),
    ("adam", "whitened", None, DERIVATIVES), ("adam", "none", None, None), ("adam", "whitened", None, None),
]  # fmt: skip
LBFGS: Arm = ("lbfgs", "none", None, None)
OTHERS: list[Arm] = [("muon", "preconditioned", None, None), ("momentum", "preconditioned", None, None)]
OFTEN: list[Arm] = [(optimizer, "whitened", every, DERIVATIVES) for every in (3, 1) for optimizer in ("soap", "muon")]
#: The arms of each protocol, (equation, points, seconds or steps), most valuable first.
PROTOCOLS: dict[tuple[str, str, float | int], Sequence[Arm]] = {
    ("poisson", "fixed", 60.0): [*MAIN, LBFGS],
    ("poisson", "fixed", 2000): [*MAIN, *OTHERS, *OFTEN],
    ("heat", "fixed", 2000): [*MAIN[:2], *MAIN[3:5], *MAIN[6:8]],
    ("poisson", "drawn", 2000): MAIN,
}


def _cell(values: Sequence[float]) -> Cell:
    powers = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    low, middle, high = (10**power for power in powers)
    numbers = {"": middle, "low": low, "high": high, "n": len(values)}
    return Cell(f"{middle:.2g} ({low:.2g} to {high:.2g})", numbers)


_LOOK = Look(
    math.log10,
    _cell,
    "relative L2 error",
    lambda difference: f"× {10**difference:.2f}",
    logarithmic=True,
    about="Relative L2 error over 9,000 points, median and quartiles over seeds, each with a network and points of its "
    "own. Learning rate and damping are the best of an arm's trials, whose points stay. A trial of Poisson's equation "
    "takes 30 seconds if the arm has run for a minute; all others take 1,000 steps. Differences are ratios of "
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
    return sections(store, name, folder, _LOOK, _named, lambda arm: arm[1:] in (*MAIN, LBFGS))


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
        for optimizer, method, every, rows in arms:
            # 2,000 steps are about as long as the trials of the minute.
            timed = (optimizer, method, every, rows) in PROTOCOLS["poisson", "fixed", 60.0]
            searched = 60.0 if equation == "poisson" and timed and not options.steps else whole
            like = EquationRun("", "none", equation=equation, **limit(searched, 0.5))
            own: dict[str, Any] = {"optimizer": optimizer, "method": method, "every": every, "rows": rows}
            own["damping"] = DAMPING if METHODS[method].damped else None
            first = replace(like, lr=STARTS[optimizer], **own)
            (chosen,) = choose([around(first, options.trials)], PINNS, store, math.log)
            seeds = range(1, options.seeds + 1)
            run_all([replace(chosen, points=points, seed=seed, **limit(whole)) for seed in seeds], PINNS, store)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--equation", choices=EQUATIONS, help="this one alone")
    parser.add_argument("--points", choices=POINTS, help="these alone: fixed, or drawn anew at every step")
    parser.add_argument("--trials", type=int, default=10, help="that choose an arm's learning rate and damping")
    parser.add_argument("--seeds", type=int, default=5, help="how many; they begin at 1")
    parser.add_argument("--steps", type=int, help="in place of each protocol's own length")
    add_progress_arguments(parser)


STUDIES = {
    "poisson": Study(
        "physics-informed networks: Poisson's and the heat equation", _run, report, _arguments,
        makes=[Recipe(4.0)], smoke="--equation heat --trials 1 --seeds 1 --steps 1", page="docs/results/fields.md",
    )
}  # fmt: skip
