"""A Fourier neural operator and RealNVP: whitened optimizers beside the plainest remedies.

Settings of an arm come from trials with data and a network of another seed, until the best learning rate is inside.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.arms import Arm, compete, errors, first_trial, label
from ..core.store import Result, Store, setting
from ..core.study import Recipe, Sections, Study, Training
from ..core.tables import Cell, Section, grouped, machine, mean_and_error, paired, pivot
from ..problems.surrogates import BLOCKS, COUPLINGS, SURROGATES, TEST, TRAIN, VISCOSITY, SurrogateRun

ADAM, WHITENED = (Arm("none", "adam", method) for method in ("none", "whitened"))
ARMS = [
    ADAM, WHITENED, *(Arm("none", optimizer, "none") for optimizer in ("soap", "muon")),
    Arm("none", "soap", "whitened"), Arm("layernorm", "adam", "none"),
]  # fmt: skip
#: Steps in units of those of other arms.
LONGER = 2
#: Data set → arms that run on it besides, with settings that a practitioner would change.
REMEDIES: dict[str, list[tuple[Arm, Mapping[str, Any]]]] = {
    "burgers": [
        *((ADAM, {"spectral_rate": rate}) for rate in (0.32, 3.2)),
        (WHITENED, {"spectral_rate": 3.2}),
    ],
    "moons": [(arm, {"start": "zero"}) for arm in (ADAM, WHITENED)],
    "patches": [
        *((arm, {"start": "zero"}) for arm in (ADAM, WHITENED)),
        *((Arm("columns", *each), {}) for each in (("adam", "none"), ("adam", "whitened"), ("soap", "none"))),
    ],
}
TITLES = {
    "burgers": "operator, relative error",
    "moons": "flow, two moons, nats",
    "patches": "flow, squares of photographs, nats",
}
STARTS = {"adam": 1e-2, "soap": 3.2e-3, "muon": 1e-2}


def _key(result: Result) -> tuple[Any, ...]:
    s = result["settings"]
    names = ("norm", "optimizer", "method", "spectral_rate", "start", "longer")
    return tuple(s.get(name) for name in names)


def _name(settings: Mapping[str, Any]) -> str:
    words = {
        "spectral_rate": f"modes at {settings.get('spectral_rate')} times its rate",
        "start": "couplings begin as the identity",
        "longer": f"{settings.get('longer')} times the steps",
    }
    return ", ".join([label(settings), *(text for name, text in words.items() if name in settings)])


def _cell(runs: Sequence[Result], bare: Sequence[Result]) -> Cell:
    own, is_ratio = errors(runs), runs[0]["settings"]["data_set"] == "burgers"
    mean, error = mean_and_error([*own.values()])
    shown = f"{mean:.4f}" if is_ratio else f"{mean:.2f}"
    numbers = {"": mean, "n": len(own), "learning rate": runs[0]["settings"]["lr"]}
    numbers |= {"damping": runs[0]["settings"]["damping"]} if "damping" in runs[0]["settings"] else {}
    numbers["ms"] = statistics.median(1000 * r["seconds"][-1] / r["steps"][-1] for r in runs)
    if len(own) > 1:
        numbers |= {"error": error}
        shown += f" ± {error:.4f}" if is_ratio else f" ± {error:.2f}"
    if len(own) > 1 and runs is not bare:
        difference = paired(own, errors(bare), float)
        numbers |= {"difference": difference.mean, "p": difference.p}
        shown += f" (p {difference.p:.2g})"
    return Cell(shown, numbers)


def report(store: Store, name: str, folder: Path) -> Sections:
    """A row for every arm, a column for every data set."""
    results = store.read()
    groups = grouped(results, lambda r: (_key(r), r["settings"]["data_set"]))
    chosen = {key: [r for r in own if setting("lr")(r) == setting("lr")(own[-1])] for key, own in groups.items()}
    rows = {key: [_name(own[0]["settings"])] for key, own in grouped(results, _key).items()}
    cells = {}
    for (key, data_set), own in chosen.items():
        cells[key, data_set] = _cell(own, chosen.get(((*key[:2], "none", *key[3:]), data_set), own))
    caption = (
        f"A Fourier neural operator of {BLOCKS} blocks learns Burgers' equation from {TRAIN:,} functions, with a "
        f"viscosity of {VISCOSITY:g}, and is judged on {TEST}; RealNVP has {COUPLINGS} couplings, of squares of 8 × 8 "
        "pixels in two photographs, those of the right quarter test. Mean over seeds, lower is better; p is of the "
        f"paired t test against the bare optimizer. {machine(results[0]['environment'])}"
    )
    columns = {data_set: title for data_set, title in TITLES.items() if any(data_set == key for _, key in groups)}
    return {name: Section([pivot(["arm"], rows, columns, cells), caption])}


@dataclass
class SurrogateOptions(Training):
    """Options of this study."""

    trials: int = 5
    """that choose an arm's learning rate, and two more of a damping"""
    seeds: int = 1
    """how many; they begin at 1"""
    steps: int = 500
    """of every run, but for some"""
    data_sets: tuple[str, ...] = tuple(TITLES)
    """that are learned"""


def _run(options: SurrogateOptions, store: Store) -> None:
    shown = [{"seed": seed} for seed in range(1, options.seeds + 1)]
    for data_set in options.data_sets:
        plain: list[tuple[Arm, Mapping[str, Any]]] = [(arm, {}) for arm in ARMS]
        more = {"longer": LONGER, "steps": LONGER * options.steps}
        for arm, changes in [*plain, (ADAM, more), *REMEDIES[data_set]]:
            like = SurrogateRun("", "none", data_set=data_set, steps=options.steps)
            first = first_trial(replace(like, **changes), arm, starts=STARTS)
            compete(first, options.trials + 2 * first.damped, SURROGATES, store, float, shown)


STUDIES = {
    "surrogates": Study(
        "a Fourier neural operator and RealNVP, by whitened optimizers and the plainest remedies", _run, report,
        SurrogateOptions(), makes=[Recipe(0.4, options=("", "--data-sets moons --seeds 5"))],
        smoke="--trials 1 --steps 2 --data-sets moons",
        page="docs/results/fields.md",
    )
}  # fmt: skip
