"""Friedman's three functions, learned from points without noise; the error is relative to the deviation of values."""

import time
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import make_friedman1, make_friedman2, make_friedman3
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from torch import Tensor, nn

from ..train import FieldRun, Problem, kind_of, perceptron, xavier

FUNCTIONS = {"friedman1": make_friedman1, "friedman2": make_friedman2, "friedman3": make_friedman3}
#: A step reads so many points at most, drawn anew; LBFGS reads all of them.
BATCH = 1000
#: Points that test.
TEST = 2000


@dataclass(frozen=True)
class FriedmanRun(FieldRun):
    """One network, by one seed."""

    lr: float | None = None
    data_set: str = "friedman1"
    points: int = 1000  # to learn from

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(("points",), data_set=FUNCTIONS)


@cache
def points(data_set: str, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Points to learn from and to test: columns and values have mean 0 and variance 1 over the first."""
    x, y = FUNCTIONS[data_set](n_samples=count + TEST, random_state=seed)
    x, y = ((part - part[:count].mean(0)) / part[:count].std(0) for part in (x, y.reshape(-1, 1)))
    return [(torch.tensor(x[part]), torch.tensor(y[part])) for part in (slice(count), slice(count, None))]


def residual(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """How far the network is from the value at a point."""
    return model(x) - y


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
        return [(residual, *self.batch())]

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
