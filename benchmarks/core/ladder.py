"""The best of runs that differ in what is chosen, and a search for rates that ends once the best is no edge."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .progress import Kind, R, run_all
from .store import Store


def best_of(
    rows: Sequence[Sequence[R]], kind: Kind, store: Store, loss: Callable[[Any], float], *,
    part: str = "search", download: bool = False,
) -> list[R]:  # fmt: skip
    """Of every row the run of the lowest `loss`, once all have run; of those that are level the first in the file.

    The loss is of what the store keeps as score, which is None of runs that broke down.
    """
    run_all([run for row in rows for run in row], kind, store, part=part, download=download)
    losses = {result["key"]: loss(result["score"]) for result in store.read(part)}
    keys = [{run.key(part): run for run in row} for row in rows]
    return [own[min((key for key in losses if key in own), key=losses.__getitem__)] for own in keys]


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
    """
    tried = {run: list(ladder(run).first) for row in rows for run in row}
    while True:
        trials = [[replace(run, lr=lr) for lr in rates] for run, rates in tried.items()]
        best = dict(zip(tried, best_of(trials, kind, store, loss, download=download), strict=True))
        places = {run: ladder(run).rates.index(found.lr) for run, found in best.items()}
        around = {run: ladder(run).rates[max(0, place - 1) : place + 2] for run, place in places.items()}
        further = {run: [lr for lr in around[run] if lr not in rates] for run, rates in tried.items()}
        if not any(further.values()):
            return best_of([[best[run] for run in row] for row in rows], kind, store, loss)
        tried = {run: [*rates, *further[run]] for run, rates in tried.items()}
