"""Regression behind badly conditioned features, with and without a normaliser, by bare and by wrapped optimizers.

Each arm's learning rate (and damping) come from ten trials on held-out rows of a set and a seed of its own. Then ten
seeds draw rows, network and batches; each stops where the error on held-out rows was lowest.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from ..core.arms import STARTS, Arm, arm, compete, errors, first_trial, label
from ..core.store import Result, Store
from ..core.study import Compared, Recipe, Sections, Study, check_length
from ..core.tables import Cell, Section, grouped, machine, paired, pivot
from ..problems.regression import DATA_SETS, TABULAR, TableRun

ARMS = [
    *(Arm("none", optimizer, method) for optimizer, method in product(["adam", "muon", "soap"], ["none", "whitened"])),
    *(Arm("batchnorm", optimizer, "none") for optimizer in ["adam", "muon", "soap"]),
    *(Arm("columns", optimizer, "none") for optimizer in ["adam", "soap", "muon"]),
    Arm("layernorm", "adam", "none"), Arm("none", "muon", "preconditioned"),
]  # fmt: skip


def _cell(own: Sequence[Result], bare: Sequence[Result] | None) -> Cell:
    found = errors(own)
    mean = math.exp(statistics.fmean(map(math.log, found.values())))
    numbers = {"": mean, "n": len(found)}
    if bare is None:
        return Cell(f"{mean:.3f}", numbers)
    difference = paired(found, errors(bare), math.log)
    ratio, p = math.exp(difference.mean), difference.p
    return Cell(f"{mean:.3f} (× {ratio:.2f}, p {p:.2g})", {**numbers, "ratio": ratio, "p": p})


def report(store: Store, name: str, folder: Path) -> Sections:
    """A row for every arm, a column for every condition and for each set that is what it is."""
    found = [result for result in store.read() if result["error"][-1] is not None]
    if not found:
        return {}
    groups = grouped(found, lambda r: (arm(r), r["settings"]["data_set"].rpartition("-")[2]))
    columns = {name: name if name == "diabetes" else f"condition {name}" for _, name in groups}
    rows = {key: label(own[0]["settings"]) for key, own in grouped(found, arm).items()}
    cells = {}
    for (key, column), own in groups.items():
        cells[key, column] = _cell(own, groups.get((key.bare, column)) if key != key.bare else None)
    caption = (
        "Mean squared error on test rows, relative to the values' variance; geometric mean over data sets and seeds, "
        "and in brackets the ratio to the bare optimizer's with p of the paired t test of logarithms. "
        f"{machine(found[0]['environment'])}"
    )
    return {name: Section([pivot(["arm"], rows, columns, cells), caption])}


def _run(options: Compared, store: Store) -> None:
    check_length(store, steps=options.steps)
    shown = [{"seed": seed, "held_out": None} for seed in range(1, options.seeds + 1)]
    for data_set, each in product(DATA_SETS, ARMS):
        like = TableRun("", "none", data_set=data_set, steps=options.steps, held_out=True)
        first = first_trial(like, each, starts=STARTS | {"soap": 1e-2})
        compete(first, options.trials, TABULAR, store, math.log, shown)


STUDIES = {
    "tabular": Study(
        "regression behind badly conditioned features", _run, report, Compared(steps=600),
        makes=[Recipe(0.8)], smoke="--trials 1 --seeds 1 --steps 1", page="docs/results/fields.md",
    )
}  # fmt: skip
