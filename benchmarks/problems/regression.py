"""Regression behind badly conditioned features; the error is the mean square on test rows, of standardised values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, make_friedman1, make_friedman2, make_friedman3
from torch import Tensor, nn

from ..train import NORMS, FieldRun, Problem, kind_of, perceptron

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

    norms = (*FieldRun.norms, "columns")  # whitened once, before training

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check((), data_set=DATA_SETS)


def mixed(x: np.ndarray, condition: float, generator: np.random.Generator) -> np.ndarray:
    """The rows of x behind a random linear map with singular values from 1 to 1 / condition."""
    size = x.shape[1]
    left, right = (np.linalg.qr(generator.normal(size=(size, size)))[0] for _ in range(2))
    return x @ (left * np.geomspace(1, 1 / condition, size)) @ right


@cache
def rows(data_set: str, seed: int, are_white: bool) -> list[tuple[Tensor, Tensor]]:
    """Rows to train, held out, and to test: columns and values have mean 0 and variance 1 over those that train.

    White columns are uncorrelated over these, too.
    """
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
    if are_white:
        _, scales, directions = np.linalg.svd(x[first], full_matrices=False)
        x = x @ directions.T * (math.sqrt(ends[0]) / scales)
    parts = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
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
        errors = [F.mse_loss(model(x).squeeze(-1), y).item() for x, y in self.judges]
        model.train()
        if not math.isfinite(errors[0]):
            return math.nan
        self.best = min(self.best, errors)
        return self.best[0 if self.run.held_out else 1]


TABULAR = kind_of(Regression)
