"""A search for rates that ends once the best is no edge of what was tried."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .progress import Kind, run_all
from .store import Store


class Ladder(NamedTuple):
    """Rates, ascending, and those that a search begins with."""

    rates: tuple[float, ...]
    first: tuple[float, ...]


def climb(
    rows: Sequence[Sequence[Any]], ladder: Callable[[Any], Ladder], kind: Kind, store: Store,
    loss: Callable[[Any], float], *, download: bool = False,
) -> list[Any]:  # fmt: skip
    """The best run of every row, whose runs differ in what is chosen beside the rate; their own rates go unread.

    Each begins with the first rates of its ladder, and tries the next ones until the best has both of its neighbours.
    Best is the lowest `loss` of what the store keeps as score, which is None of runs that broke down.
    """
    tried = {run: list(ladder(run).first) for row in rows for run in row}
    while True:
        trials = {run: [replace(run, lr=lr) for lr in rates] for run, rates in tried.items()}
        planned = [trial for found in trials.values() for trial in found]
        run_all(planned, kind, store, part="search", download=download)
        losses = {result["key"]: loss(result["score"]) for result in store.read("search")}
        best = {run: min(found, key=lambda trial: losses[trial.key("search")]) for run, found in trials.items()}
        places = {run: ladder(run).rates.index(found.lr) for run, found in best.items()}
        around = {run: ladder(run).rates[max(0, place - 1) : place + 2] for run, place in places.items()}
        further = {run: [lr for lr in around[run] if lr not in rates] for run, rates in tried.items()}
        if not any(further.values()):
            return [min((best[run] for run in row), key=lambda trial: losses[trial.key("search")]) for row in rows]
        tried = {run: [*rates, *further[run]] for run, rates in tried.items()}
