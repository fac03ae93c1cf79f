"""Settings chosen on a validation split: rates from one grid, then everything by trials, as many for every method."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from .methods import METHODS
from .runs import Run
from .tables import mean_and_error

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


def search(final: Iterable[Run], epochs: int) -> list[Run]:
    """The runs that choose the rates of `final`: every rate of the grid, one seed, fewer epochs, validated."""
    return [
        replace(run, lr=lr, seeds=run.seeds[:1], epochs=epochs, validation=True)
        for run in final
        for lr in GRIDS[run.optimizer]
    ]


def choose(final: Iterable[Run], found: Iterable[dict[str, Any]]) -> list[Run]:
    """`final` at the rates that reached the highest validation accuracy in the last epoch of the search.

    Raises:
        ValueError: the search of one of the runs has no result.
    """
    results = list(found)
    chosen = []
    for run in final:
        same = [r for r in results if _same_search(run, r["settings"])]
        if not same:
            raise ValueError(f"no search results for {run.method}, {run.activation}, {run.optimizer}.")
        best = max(same, key=lambda result: mean_and_error(result["test_accuracy"][-1])[0])
        settings = {name: best["settings"].get(name) for name in ("lr", "weight_decay", "damping")}
        chosen.append(replace(run, **settings))
    return chosen


def grid(
    final: Iterable[Run], rates: list[float], decays: list[float | None], dampings: list[float | None]
) -> list[Run]:
    """Every combination of the given settings for every run of `final`: of its own length, one seed, validated."""
    return [
        replace(run, lr=lr, weight_decay=decay, damping=damping, seeds=run.seeds[:1], validation=True)
        for run in final
        for lr in rates
        for decay in decays
        for damping in dampings
    ]


def trials(chosen: Iterable[Run], count: int) -> list[Run]:
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


def _between(low: float, high: float, share: float) -> float:
    return float(low * (high / low) ** share)


def _significant(value: float) -> float:
    return float(f"{value:.2g}")


def _same_search(run: Run, settings: dict[str, Any]) -> bool:
    wanted = run.settings()
    names = ("data", "method", "activation", "optimizer", "schedule", "hidden", "batch_size")
    return all(list_if_tuple(wanted[name]) == settings[name] for name in names)


def list_if_tuple(value: Any) -> Any:
    """What JSON makes of a value."""
    return list(value) if isinstance(value, tuple) else value
