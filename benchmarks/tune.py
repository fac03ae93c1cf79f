"""Learning rates chosen on a validation split, from one grid for every method."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .report import mean_and_error
from .runs import Run

#: Steps of about three. A rate chosen at an edge says that the best may lie beyond it.
GRIDS: dict[str, tuple[float, ...]] = {
    "sgd": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "adam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
}


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
        chosen.append(replace(run, lr=best["settings"]["lr"]))
    return chosen


def _same_search(run: Run, settings: dict[str, Any]) -> bool:
    wanted = run.settings()
    names = ("data", "method", "activation", "optimizer", "schedule", "hidden", "batch_size")
    return all(list_if_tuple(wanted[name]) == settings[name] for name in names)


def list_if_tuple(value: Any) -> Any:
    """What JSON makes of a value."""
    return list(value) if isinstance(value, tuple) else value
