"""Regression behind badly conditioned features, with and without a normaliser, by bare and by wrapped optimizers.

The error is the mean square on test rows, of standardised values. Each arm's learning rate (and damping) come from ten
trials on held-out rows of a set and a seed of its own. Then ten seeds draw rows, network and batches; each stops where
the error on held-out rows was lowest.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from ..core.arms import STARTS, Arm, arm, compete, errors, first_trial, label
from ..core.store import Result, Store
from ..core.study import Compared, Recipe, Sections, Study, check_length
from ..core.tables import Cell, Section, grouped, machine, paired, pivot
from ..train import NORMS, FieldRun, Problem, kind_of, perceptron
from .friedman import FUNCTIONS

CONDITIONS = (1, 100, 10000)
#: A problem of Friedman's and the condition of the map behind it, or a set that is what it is.
DATA_SETS = [*(f"{name}-{condition}" for name, condition in product(FUNCTIONS, CONDITIONS)), "diabetes"]
#: Rows that train, are held out, and test; of sets that are what they are shares.
ROWS = (2000, 500, 1000)
SHARES = (0.6, 0.2, 0.2)
#: Standard deviation of the noise, of that of the values.
NOISE = 0.1
WIDTH, LAYERS, BATCH = 64, 4, 128


@dataclass(frozen=True)
class TableRun(FieldRun):
    """One network, by one seed."""

    data_set: str = "friedman1-1"
    held_out: bool | None = None  # judged by held-out rows, as trials are

    norms = (*FieldRun.norms, "columns")  # whitened once, before training
    known: ClassVar = {"data_set": DATA_SETS}


@cache
def rows(data_set: str, seed: int, are_white: bool) -> list[tuple[Tensor, Tensor]]:
    """Rows to train, held out, and to test: columns and values have mean 0 and variance 1 over those that train.

    Friedman's are behind a random linear map with singular values from 1 to 1 / condition. White columns are
    uncorrelated over the rows that train, too.
    """
    generator = np.random.default_rng(seed)
    if data_set == "diabetes":
        x, y = load_diabetes(return_X_y=True)
        order = generator.permutation(len(x))
        x, y = x[order], y[order]
        ends = np.cumsum([int(share * len(x)) for share in SHARES])
    else:
        name, condition = data_set.split("-")
        x, y = FUNCTIONS[name](n_samples=sum(ROWS), random_state=seed)
        size = x.shape[1]
        left, right = (np.linalg.qr(generator.normal(size=(size, size)))[0] for _ in range(2))
        x = (x - x.mean(0)) / x.std(0) @ (left * np.geomspace(1, 1 / float(condition), size)) @ right
        y = y + NOISE * y.std() * generator.normal(size=len(y))
        ends = np.cumsum(ROWS)
    first = slice(0, ends[0])
    x, y = ((part - part[first].mean(0)) / part[first].std(0) for part in (x, y))
    if are_white:
        _, scales, directions = np.linalg.svd(x[first], full_matrices=False)
        x = x @ directions.T * (math.sqrt(ends[0]) / scales)
    parts = [slice(*ends) for ends in pairwise([0, *ends])]
    return [(torch.tensor(x[part]).float(), torch.tensor(y[part]).float()) for part in parts]


class Regression(Problem):
    """A ReLU network that stops where the error on held-out rows was lowest."""

    def __init__(self, run: TableRun) -> None:
        self.run, self.generator = run, torch.Generator().manual_seed(run.seed)
        self.train, *self.judges = rows(run.data_set, run.seed, run.norm == "columns")
        self.best = [math.inf, math.inf]

    def model(self) -> nn.Module:
        torch.manual_seed(self.run.seed)
        widths = [self.train[0].shape[1], *[WIDTH] * (LAYERS - 1), 1]
        return nn.Sequential(*perceptron(widths, self.run.norm if self.run.norm in NORMS else "none"))

    def loss(self, model: nn.Module, optimizer: object) -> Tensor:
        x, y = self.train
        drawn = torch.randint(len(x), (BATCH,), generator=self.generator)
        return F.mse_loss(model(x[drawn]).squeeze(-1), y[drawn])

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """The mean squared error on test rows, when that on held-out rows was lowest so far; of trials the latter."""
        model.eval()
        both = [F.mse_loss(model(x).squeeze(-1), y).item() for x, y in self.judges]
        model.train()
        if not math.isfinite(both[0]):
            return math.nan
        self.best = min(self.best, both)
        return self.best[0 if self.run.held_out else 1]


TABULAR = kind_of(Regression)
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
    if not math.isfinite(mean):
        return Cell("diverged", numbers)
    if bare is None:
        return Cell(f"{mean:.3f}", numbers)
    difference = paired(found, errors(bare), math.log)
    ratio, p = math.exp(difference.mean), difference.p
    return Cell(f"{mean:.3f} (× {ratio:.2f}, p {p:.2g})", {**numbers, "ratio": ratio, "p": p})


def report(store: Store, name: str, folder: Path) -> Sections:
    """A row for every arm, a column for every condition and for each set that is what it is."""
    found = store.read()
    groups = grouped(found, lambda r: (arm(r), r["settings"]["data_set"].rpartition("-")[2]))
    columns = {name: name if name == "diabetes" else f"condition {name}" for _, name in groups}
    rows = {key: label(own[0]["settings"]) for key, own in grouped(found, arm).items()}
    cells = {
        (key, column): _cell(own, groups.get((key.bare, column)) if key != key.bare else None)
        for (key, column), own in groups.items()
    }
    about = "Geometric mean over data sets and seeds; p is of the paired t test of logarithms, to the bare optimizer."
    caption = f"{about} {machine(found[0]['environment'])}"
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
