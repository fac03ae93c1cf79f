"""Settings chosen on a validation split: rates from one grid, then everything by trials, as many for every method."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from ..core.store import Result
from ..methods import METHODS
from .run import ImageRun

#: Steps of about three. A rate chosen at an edge says that the best may lie beyond it.
GRIDS: dict[str, tuple[float, ...]] = {
    "sgd": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "adam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "momentum": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
}

#: Where trials look: the rate within this factor of the grid's choice …
RATE_FACTOR = 5.0
#: … the share of a weight that decay takes in one step at the full rate …
SHRINK = (3e-6, 3e-4)
#: … and the dampings, of methods that have one: few, so that many trials of one damping train side by side.
DAMPING = (0.1, 0.3, 1.0, 3.0)


def search(final: Iterable[ImageRun], epochs: int) -> list[ImageRun]:
    """The runs that choose the rates of `final`: every rate of the grid, one seed, fewer epochs, validated."""
    return [
        replace(run, lr=lr, seeds=run.seeds[:1], epochs=epochs, validation=True)
        for run in final
        for lr in GRIDS[run.optimizer]
    ]


def trials(chosen: Iterable[ImageRun], count: int) -> list[ImageRun]:
    """`count` trials around every chosen run, of its own length, one seed, validated.

    The trials of all methods are the same points of one Sobol sequence: rate and weight decay, each spread
    evenly over the logarithm of its range, and damping, which a method without one leaves unused.
    """
    points = torch.quasirandom.SobolEngine(3, scramble=True, seed=0).draw(count, dtype=torch.float64).tolist()
    return [
        replace(
            run,
            lr=_significant(rate := _between(run.lr / RATE_FACTOR, run.lr * RATE_FACTOR, u)),
            weight_decay=_significant(_between(*SHRINK, v) * (0.1 if run.optimizer == "momentum" else 1.0) / rate),
            damping=DAMPING[int(w * len(DAMPING))] if METHODS[run.method].damped else None,
            seeds=run.seeds[:1],
            validation=True,
        )
        for run in chosen
        for u, v, w in points
    ]


def choose(final: Iterable[ImageRun], found: Iterable[Result]) -> list[ImageRun]:
    """`final` at the settings that reached the highest validation accuracy after the last epoch of their search.

    Raises:
        ValueError: the search of one of the runs has no result.
    """
    results = list(found)
    chosen = []
    for run in final:
        same = [result for result in results if _same_search(run, result)]
        if not same:
            raise ValueError(f"no search results for {run.method}, {run.activation}, {run.optimizer}.")
        best = max(same, key=lambda result: result["score"])["settings"]
        chosen.append(replace(run, **{name: best.get(name) for name in ("lr", "weight_decay", "damping")}))
    return chosen


def _same_search(run: ImageRun, result: Result) -> bool:
    names = ("data", "method", "activation", "optimizer", "schedule", "hidden", "batch_size")
    return all(run.settings()[name] == result["settings"][name] for name in names)


def _between(low: float, high: float, share: float) -> float:
    return float(low * (high / low) ** share)


def _significant(value: float) -> float:
    return float(f"{value:.2g}")
