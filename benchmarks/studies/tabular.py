"""Regression behind badly conditioned features, with and without a normaliser, by bare and by wrapped optimizers.

Each arm's learning rate (and damping) come from ten trials on held-out rows of a set and a seed of its own. Then ten
seeds draw rows, network and batches; each stops where the error on held-out rows was lowest.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, make_friedman1, make_friedman2, make_friedman3
from torch import Tensor, nn

from ..core.runs import add_progress_arguments, run_all
from ..core.store import Result, Store
from ..core.study import Recipe, Sections, Study
from ..core.table import Cell, Section, grouped, machine, pivot
from ..core.tune import around, choose
from ..fields.report import arm, compared, errors
from ..fields.run import FieldRun, Problem, kind_of, label, normalised
from ..methods import METHODS

DRAWN: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "friedman1": make_friedman1, "friedman2": make_friedman2, "friedman3": make_friedman3,
}  # fmt: skip
CONDITIONS = (1, 100, 10000)
#: A problem of Friedman's and the condition of the map behind it, or a set that is what it is.
DATA_SETS = [*(f"{name}-{condition}" for name, condition in product(DRAWN, CONDITIONS)), "diabetes"]
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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check((), data_set=DATA_SETS)


def mixed(x: np.ndarray, condition: float, generator: np.random.Generator) -> np.ndarray:
    """The rows of x behind a random linear map with singular values from 1 to 1 / condition."""
    size = x.shape[1]
    left, right = (np.linalg.qr(generator.normal(size=(size, size)))[0] for _ in range(2))
    return x @ (left * np.geomspace(1, 1 / condition, size)) @ right


@cache
def rows(data_set: str, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Rows to train, held out, and to test: columns and values have mean 0 and variance 1 over those that train."""
    generator = np.random.default_rng(seed)
    if data_set == "diabetes":
        x, y = load_diabetes(return_X_y=True)
        order = generator.permutation(len(x))
        x, y = x[order], y[order]
        ends = np.cumsum([int(share * len(x)) for share in SHARES])
    else:
        name, condition = data_set.split("-")
        x, y = DRAWN[name](n_samples=sum(ROWS), random_state=seed)
        x = mixed((x - x.mean(0)) / x.std(0), float(condition), generator)
        y = y + NOISE * y.std() * generator.normal(size=len(y))
        ends = np.cumsum(ROWS)
    first = slice(0, ends[0])
    x, y = ((part - part[first].mean(0)) / part[first].std(0) for part in (x, y))
    parts = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return [(torch.tensor(x[part]).float(), torch.tensor(y[part]).float()) for part in parts]


class Regression(Problem):
    """A ReLU network that stops where the error on held-out rows was lowest."""

    def __init__(self, run: TableRun) -> None:
        self.run, self.generator = run, torch.Generator().manual_seed(run.seed)
        self.train, *self.judges = rows(run.data_set, run.seed)
        self.best = [math.inf, math.inf]

    def model(self, run: TableRun) -> nn.Module:
        """Draw the network."""
        torch.manual_seed(run.seed)
        widths = [self.train[0].shape[1], *[WIDTH] * (LAYERS - 1)]
        parts: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            parts += [nn.Linear(inputs, outputs), *normalised(outputs, run.norm), nn.ReLU()]
        return nn.Sequential(*parts, nn.Linear(WIDTH, 1))

    def loss(self, model: nn.Module, optimizer: object) -> Tensor:
        """The mean squared error over rows that are drawn."""
        x, y = self.train
        drawn = torch.randint(len(x), (BATCH,), generator=self.generator)
        return F.mse_loss(model(x[drawn]).squeeze(-1), y[drawn])

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """The mean squared error on test rows, when that on held-out rows was lowest so far; of trials the latter."""
        model.eval()
        found = [F.mse_loss(model(x).squeeze(-1), y).item() for x, y in self.judges]
        model.train()
        if not math.isfinite(found[0]):
            return math.nan
        self.best = min(self.best, found)
        return self.best[0 if self.run.held_out else 1]


TABULAR = kind_of(Regression)
#: Normaliser, optimizer, wrapper.
ARMS = [
    *product(["none"], ["adam", "muon", "soap"], ["none", "whitened"]),
    *product(["batchnorm"], ["adam", "muon", "soap"], ["none"]),
    ("layernorm", "adam", "none"), ("none", "muon", "preconditioned"),
]  # fmt: skip
STARTS = {"adam": 1e-2, "muon": 3.2e-2, "soap": 1e-2}


def _cell(own: Sequence[Result], bare: Sequence[Result] | None) -> Cell:
    found = errors(own)
    mean = math.exp(statistics.fmean(map(math.log, found.values())))
    numbers = {"": mean, "n": len(found)}
    if bare is None:
        return Cell(f"{mean:.3f}", numbers)
    difference, p, _ = compared(found, errors(bare), math.log)
    ratio = math.exp(difference)
    return Cell(f"{mean:.3f} (× {ratio:.2f}, p {p:.2g})", {**numbers, "ratio": ratio, "p": p})


def report(store: Store, name: str, folder: Path) -> Sections:
    """A row for every arm, a column for every condition and for each set that is what it is."""
    found = [result for result in store.read() if result["error"][-1] is not None]
    if not found:
        return {}
    groups = grouped(found, lambda r: (arm(r), r["settings"]["data_set"].rpartition("-")[2]))
    columns = {name: name if name == "diabetes" else f"condition {name}" for _, name in groups}
    rows = {key: [label(own[0]["settings"])] for key, own in grouped(found, arm).items()}
    cells = {}
    for (key, column), own in groups.items():
        bare = (key[0], key[1], "none", None, None)
        cells[key, column] = _cell(own, groups.get((bare, column)) if key != bare else None)
    caption = (
        "Mean squared error on test rows, relative to the variance of the values; geometric mean over data sets and "
        "seeds, and in brackets the ratio to the bare optimizer's with p of the paired t test of logarithms. "
        f"{LAYERS} linear layers of {WIDTH}, ReLU, batches of {BATCH}; Friedman's three problems behind a random "
        f"linear map, standardised columns, {ROWS[0]} rows to train. {machine(found[0]['environment'])}"
    )
    return {name: Section([pivot(["arm"], rows, columns, cells), caption])}


def _run(options: argparse.Namespace, store: Store) -> None:
    for data_set in DATA_SETS:
        like = TableRun("", "none", data_set=data_set, steps=options.steps, held_out=True)
        for norm, optimizer, method in ARMS:
            damping = 0.1 if METHODS[method].damped else None
            first = replace(like, norm=norm, optimizer=optimizer, method=method, lr=STARTS[optimizer], damping=damping)
            (chosen,) = choose([around(first, options.trials)], TABULAR, store, math.log)
            seeds = range(1, options.seeds + 1)
            run_all([replace(chosen, seed=seed, held_out=None) for seed in seeds], TABULAR, store)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=10, help="that choose an arm's learning rate and damping")
    parser.add_argument("--seeds", type=int, default=10, help="how many; they begin at 1")
    parser.add_argument("--steps", type=int, default=600, help="of every run")
    add_progress_arguments(parser)


STUDIES = {
    "tabular": Study(
        "regression behind badly conditioned features", _run, report, _arguments,
        makes=[Recipe(0.8)], smoke="--trials 1 --seeds 1 --steps 1", page="docs/results/fields.md",
    )
}  # fmt: skip
