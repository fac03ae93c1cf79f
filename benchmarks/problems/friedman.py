"""Regression without noise, where GaussNewton is of little use: beside a Gaussian process and others, in equal time.

Networks learn Friedman's three functions from points; the error is relative to the deviation of values. Learning rates
are the best of three trials or more of a third of the length, with data and a network of another seed.
"""

import math
import time
import warnings
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import make_friedman1, make_friedman2, make_friedman3
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from torch import Tensor, nn

from ..core.arms import Arm, compete, first_trial, variants
from ..core.runs import check_known, measure, run_all
from ..core.store import Store, setting
from ..core.study import Recipe, Sections, Study, Training, check_length
from ..core.tables import Cell, Section, machine, pivot
from ..optimizers import OF_MODELS
from ..train import FieldRun, Problem, kind_of, limit, perceptron, xavier

FUNCTIONS = {"friedman1": make_friedman1, "friedman2": make_friedman2, "friedman3": make_friedman3}
#: A step reads so many points at most, drawn anew; LBFGS reads all of them.
BATCH = 1000
#: Points that test.
TEST = 2000
SECONDS = 15.0
#: The one that tables show; trials have another.
SEED = 1
OPTIMIZERS = ("soap", "adam", "lbfgs", "levenberg-marquardt", "gauss-newton")


@dataclass(frozen=True)
class FriedmanRun(FieldRun):
    """One network, by one seed."""

    lr: float | None = None
    data_set: str = "friedman1"
    points: int = 1000  # to learn from

    known, positive = {"data_set": FUNCTIONS}, ("points",)


@cache
def points(data_set: str, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Points to learn from and to test: columns and values have mean 0 and variance 1 over the first."""
    x, y = FUNCTIONS[data_set](n_samples=count + TEST, random_state=seed)
    x, y = ((part - part[:count].mean(0)) / part[:count].std(0) for part in (x, y.reshape(-1, 1)))
    return [(torch.tensor(x[part]), torch.tensor(y[part])) for part in (slice(count), slice(count, None))]


class Friedman(Problem):
    """A tanh network of two hidden layers in float64, wider where there are more points."""

    def __init__(self, run: FriedmanRun) -> None:
        self.run, self.generator = run, torch.Generator().manual_seed(run.seed)
        self.train, self.test = points(run.data_set, run.points, run.seed)

    def model(self) -> nn.Module:
        torch.manual_seed(self.run.seed)
        width = 32 if self.run.points <= BATCH else 64
        widths = (self.train[0].shape[1], width, width, 1)
        return xavier(nn.Sequential(*perceptron(widths, activation=nn.Tanh)).double())

    def batch(self) -> tuple[Tensor, Tensor]:
        """Draw the points of the next step, where they are not all."""
        x, y = self.train
        if len(x) <= BATCH or self.run.optimizer == "lbfgs":
            return x, y
        drawn = torch.randint(len(x), (BATCH,), generator=self.generator)
        return x[drawn], y[drawn]

    def loss(self, model: nn.Module, optimizer: Any) -> Tensor:
        x, y = self.batch()
        return F.mse_loss(model(x), y)

    def terms(self) -> list[Any]:
        """Half of it, as one term."""
        return [(lambda model, x, y: model(x) - y, *self.batch())]

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """The root of the mean squared error on test points."""
        x, y = self.test
        return F.mse_loss(model(x), y).sqrt().item()


def gaussian_process(data_set: str, count: int, seed: int) -> dict[str, Any]:
    """The error of scikit-learn's Gaussian process with a length for each column, which maximise the likelihood."""
    (x, y), (test, values) = ([each.numpy() for each in part] for part in points(data_set, count, seed))
    # scikit-learn's own bounds let lengths fall to where all points are apart.
    kernel = ConstantKernel(1.0, (1e-3, 1e6)) * RBF(np.ones(x.shape[1]), (1e-2, 1e3))
    process = GaussianProcessRegressor(kernel)
    start = time.process_time()
    with warnings.catch_warnings(action="ignore"):  # the length of a column that does nothing ends at its bound
        process.fit(x, y.ravel())
    seconds = time.process_time() - start
    error = float(np.sqrt(np.mean((process.predict(test) - values.ravel()) ** 2)))
    settings = {"optimizer": "gaussian-process", "data_set": data_set, "points": count, "seed": seed}
    return {"settings": settings, "error": [error], "seconds": [seconds]}


FRIEDMAN = kind_of(Friedman, pace=100)


def report(store: Store, name: str, folder: Path) -> Sections:
    """A row for every method, a column for every set of points."""
    results, cells = store.read(), dict[tuple[str, tuple[str, int]], Cell]()
    for r in results:
        error, seconds = r["error"][-1], r["seconds"][-1]  # no error where it diverged, no seconds of a diverged start
        numbers = {name: value for name, value in {"": error, "seconds": seconds}.items() if value}
        text = "diverged" if error is None else f"{error:.2g}"
        cells[r["settings"]["optimizer"], setting("data_set", "points")(r)] = Cell(text, numbers)
    known = {"gaussian-process": "Gaussian process"} | {name: each.label for name, each in OF_MODELS.items()}
    labels = {method: known[method] for method, _ in cells}
    sets = sorted({column for _, column in cells}, key=lambda column: column[::-1])
    columns = {column: f"Friedman {column[0][-1]}, {column[1]:,} points" for column in sets}
    caption = (
        f"Root mean squared error on {TEST:,} test points, relative to the deviation of their values; one seed. "
        f"{machine(results[0]['environment'])}"
    )
    return {name: Section([pivot(["method"], labels, columns, cells), caption])}


@dataclass
class FriedmanOptions(Training):
    """Options of this study."""

    trials: int = 3  # that choose the learning rate of SOAP and Adam
    points: tuple[int, ...] = (1000, 20000)  # to learn from
    optimizers: tuple[str, ...] = OPTIMIZERS  # that train the network
    steps: int | None = None  # in place of seconds


def _run(options: FriedmanOptions, store: Store) -> None:
    check_known("optimizer", options.optimizers, OPTIMIZERS)
    length = options.steps or SECONDS
    check_length(store, **limit(length))
    shown = [{"seed": SEED, **limit(length)}]
    for count, data_set in product(options.points, FUNCTIONS):
        if count <= BATCH:
            process = partial(gaussian_process, data_set, count, SEED)
            measure(store, {f"Gaussian process, {data_set}, {count} points": process})
        for optimizer in options.optimizers:
            like = FriedmanRun("", "none", data_set=data_set, points=count, **limit(length, 1 / 3))
            if OF_MODELS[optimizer].searches:
                own = replace(like, optimizer=optimizer, lr=1.0 if optimizer == "lbfgs" else None)
                run_all(variants(own, shown), FRIEDMAN, store)
            else:
                first = first_trial(like, Arm("none", optimizer, "none"), starts={"adam": 1e-2, "soap": 1e-2})
                compete(first, options.trials, FRIEDMAN, store, math.log, shown)


STUDIES = {
    "friedman": Study(
        "regression without noise: a Gaussian process, GaussNewton and others", _run, report, FriedmanOptions(),
        makes=[Recipe(0.25)], smoke="--trials 1 --points 30 --steps 1 --optimizers soap gauss-newton",
        page="docs/gauss-newton.md",
    )
}  # fmt: skip
