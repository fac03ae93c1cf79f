"""Nonlinear differential equations: GaussNewton beside first-order optimizers, at equal processor time.

Learning rate and damping of the others are the best of ten trials of a quarter of the length, on seed 0, which no table
shows. GaussNewton has neither, and no trials.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.arms import Arm, Look, compete, first_trial, quartiles, sections, variants
from ..core.runs import run_all
from ..core.store import Store
from ..core.study import Recipe, Sections, Study, Training
from ..problems.equations import EQUATIONS, SOLVED, NonlinearRun
from ..train import DERIVATIVES, limit

GAUSS_NEWTON = Arm("none", "gauss-newton", "none")
#: Most valuable first.
ARMS = [
    GAUSS_NEWTON,
    Arm("none", "soap", "none"),
    Arm("none", "soap", "whitened", None, DERIVATIVES),
    Arm("none", "muon", "none"),
    Arm("none", "adam", "none"),
]
#: Of the three hidden layers → how many points inside GaussNewton draws.
WIDTHS = {20: 600, 50: 300}
SECONDS = 60.0
_LOOK = Look(
    math.log10,
    quartiles,
    "relative L2 error",
    lambda difference: f"× {10**difference:.2g}",
    logarithmic=True,
    about="Relative L2 error over 9,000 points, median and quartiles over seeds, each with a network and points of its "
    "own. Every step draws 300 points inside and 60 on the sides; GaussNewton on the network of width 20 draws 600 and "
    "100. Xavier's initialisation, tanh, float64. Learning rate and damping are the best of an arm's trials of 15 "
    "seconds; GaussNewton has none. Learning rates rise over 20 steps and fall to 0 by a cosine.",
)


def _named(settings: Mapping[str, Any]) -> tuple[str, str]:
    length = f"{settings['seconds']:g} seconds of one core" if "seconds" in settings else f"{settings['steps']} steps"
    equation = {"burgers": "Burgers' travelling wave", "reaction": "The reaction equation, ρ = 5"}
    width = settings["width"]
    heading = f"{equation[settings['equation']]}, network 2-{width}-{width}-{width}-1, {length}"
    return f"{settings['equation']}-{width}", heading


def report(store: Store, name: str, folder: Path) -> Sections:
    """A section for every equation and network."""
    return sections(store, name, folder, _LOOK, _named, lambda arm: True)


@dataclass
class NonlinearOptions(Training):
    """Options of this study."""

    equation: str | None = None
    """this one alone: burgers or reaction"""
    optimizer: str | None = None
    """this one alone: gauss-newton, soap, muon or adam"""
    width: int | None = None
    """of the network, this one alone: 20 or 50"""
    trials: int = 10
    """that choose an arm's learning rate and damping"""
    seeds: int = 5
    """how many; they begin at 1"""
    steps: int | None = None
    """in place of a minute"""


def _run(options: NonlinearOptions, store: Store) -> None:
    length = options.steps or SECONDS
    shown = [{"seed": seed, **limit(length)} for seed in range(1, options.seeds + 1)]
    for equation in EQUATIONS:
        for arm in ARMS:
            for width, inner in WIDTHS.items():
                wanted = (options.equation, equation), (options.optimizer, arm.optimizer), (options.width, width)
                if any(asked not in (None, value) for asked, value in wanted):
                    continue
                like = NonlinearRun("", "none", equation=equation, width=width, **limit(length, 0.25))
                if arm == GAUSS_NEWTON:
                    own = replace(like, optimizer=arm.optimizer, inner=inner)
                    run_all(variants(own, shown), SOLVED, store)
                else:
                    compete(first_trial(like, arm, damping=3.2e-3), options.trials, SOLVED, store, math.log, shown)


STUDIES = {
    "equations": Study(
        "nonlinear differential equations: Burgers' and reaction", _run, report, NonlinearOptions(),
        makes=[Recipe(2.5)], smoke="--equation burgers --optimizer gauss-newton --width 20 --seeds 1 --steps 1",
        page="docs/results/fields.md",
    )
}  # fmt: skip
