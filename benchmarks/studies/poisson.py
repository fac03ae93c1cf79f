"""Physics-informed networks: a differential equation solved by a network of its coordinates, in float64.

Each arm's learning rate (and damping) come from ten trials of half the length, on points and by a seed that no table
shows; arms of the minute take its settings to 2,000 steps and drawn points as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.arms import Arm, Look, compete, first_trial, quartiles, sections
from ..core.store import Store
from ..core.study import Recipe, Sections, Study, Training
from ..problems.poisson import PINNS, EquationRun
from ..train import DERIVATIVES, limit

MAIN = [
    Arm("none", optimizer, method, None, rows)
    for optimizer in ("soap", "muon", "adam")
    for method, rows in (("whitened", DERIVATIVES), ("none", None), ("whitened", None))
]
LBFGS = Arm("none", "lbfgs", "none")
OTHERS = [Arm("none", optimizer, "preconditioned") for optimizer in ("muon", "momentum")]
OFTEN = [Arm("none", optimizer, "whitened", every, DERIVATIVES) for every in (3, 1) for optimizer in ("soap", "muon")]
#: The arms of each protocol, (equation, points, seconds or steps), most valuable first.
PROTOCOLS: dict[tuple[str, str, float | int], Sequence[Arm]] = {
    ("poisson", "fixed", 60.0): [*MAIN, LBFGS],
    ("poisson", "fixed", 2000): [*MAIN, *OTHERS, *OFTEN],
    ("heat", "fixed", 2000): [*MAIN[:2], *MAIN[3:5], *MAIN[6:8]],
    ("poisson", "drawn", 2000): MAIN,
}


_LOOK = Look(
    math.log10,
    quartiles,
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
    return sections(store, name, folder, _LOOK, _named, [*MAIN, LBFGS].__contains__)


@dataclass
class EquationOptions(Training):
    """Options of this study."""

    equation: str | None = None
    """this one alone: poisson or heat"""
    trials: int = 10
    """that choose an arm's learning rate and damping"""
    seeds: int = 5
    """how many; they begin at 1"""
    steps: int | None = None
    """in place of each protocol's own length"""


def _run(options: EquationOptions, store: Store) -> None:
    for (equation, points, length), arms in PROTOCOLS.items():
        if options.equation not in (None, equation):
            continue
        whole = options.steps or length
        shown = [{"points": points, "seed": seed, **limit(whole)} for seed in range(1, options.seeds + 1)]
        for arm in arms:
            # 2,000 steps are about as long as the trials of the minute.
            is_timed = equation == "poisson" and arm in PROTOCOLS["poisson", "fixed", 60.0] and not options.steps
            like = EquationRun("", "none", equation=equation, **limit(60.0 if is_timed else whole, 0.5))
            compete(first_trial(like, arm, damping=3.2e-3), options.trials, PINNS, store, math.log, shown)


STUDIES = {
    "poisson": Study(
        "physics-informed networks: Poisson's and the heat equation", _run, report, EquationOptions(),
        makes=[Recipe(4.0)], smoke="--equation heat --trials 1 --seeds 1 --steps 1", page="docs/results/fields.md",
    )
}  # fmt: skip
