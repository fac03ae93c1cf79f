"""The choice of rate and damping, by validation loss."""

import math
from collections.abc import Iterable
from typing import Any

from .methods import METHODS
from .settings import CharRun


def dampings(method: str, given: list[float]) -> list[float] | list[None]:
    """The dampings to run a method with: none, once, if it has none."""
    return given if method in METHODS and METHODS[method].damped else [None]


def final_validation_loss(result: dict[str, Any]) -> float:
    """The loss after the last step; infinite if the run diverged."""
    loss = result["validation_loss"][-1]
    return math.inf if result["diverged"] or loss is None else float(loss)


def choose(trials: Iterable[CharRun], results: Iterable[dict[str, Any]]) -> list[CharRun]:
    """For every method, norm and number of steps the trial of the lowest final validation loss.

    Args:
        trials: one seed each.
        results: of the trials, in their order.
    """
    best: dict[tuple[str, str, int], tuple[float, CharRun]] = {}
    for trial, result in zip(trials, results, strict=True):
        key, loss = (trial.method, trial.norm, trial.steps), final_validation_loss(result)
        if key not in best or loss < best[key][0]:
            best[key] = loss, trial
    return [trial for _, trial in best.values()]
