"""How settings are chosen: one loop, and what it tries next: a grid, a ladder of rates, or what is around the best."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .runs import Kind, R, run_all
from .store import Store

#: Runs that were tried → their losses, in the order of the file.
Tried = Mapping[Any, float]
#: What to try next; nothing, once a search is over.
Search = Callable[[Tried], Sequence[Any]]


def choose(
    searches: Sequence[Search], kind: Kind, store: Store, loss: Callable[[Any], float] = float, *,
    part: str = "search", each: Callable[[R], Sequence[R]] = lambda run: [run], download: bool = False,
) -> list[Any]:  # fmt: skip
    """The run of the lowest loss of every search, all of which go on side by side, with trials in a part of the store.

    `loss` is of a score; of one that is None, where a run broke down, it is infinite. A trial is the runs that `each`
    makes of one, and has their mean loss; of trials that are level the first in the file is chosen.
    """
    asked = [dict.fromkeys(search({})) for search in searches]
    while True:
        run_all([one for own in asked for run in own for one in each(run)], kind, store, part=part, download=download)
        scores = {r["key"]: math.inf if r["score"] is None else loss(r["score"]) for r in store.read(part)}
        places = {key: place for place, key in enumerate(scores)}
        keys = {run: [one.key(part) for one in each(run)] for own in asked for run in own}
        in_order = [sorted(own, key=lambda run: places[keys[run][0]]) for own in asked]
        tried = [{run: statistics.fmean(scores[key] for key in keys[run]) for run in own} for own in in_order]
        new = [search(own) for search, own in zip(searches, tried, strict=True)]
        if not any(new):
            return [min(own, key=own.__getitem__) for own in tried]
        asked = [own | dict.fromkeys(more) for own, more in zip(asked, new, strict=True)]


def grid(runs: Iterable[Any]) -> Search:
    """All of some runs, once."""
    every = list(runs)
    return lambda tried: [] if tried else every


def ladder(runs: Sequence[Any], rates: Sequence[float], first: Sequence[float]) -> Search:
    """Every run at the first rates, and at the next ones until the best has both of its neighbours; or there are none.

    Rates ascend. Those of the runs go unread, and each climbs by itself.
    """

    def search(tried: Tried) -> list[Any]:
        new = []
        for run in runs:
            own = {one.lr: loss for one, loss in tried.items() if replace(one, lr=run.lr) == run}
            place = rates.index(min(own, key=own.__getitem__)) if own else 0
            wanted = rates[max(0, place - 1) : place + 2] if own else first
            new += [replace(run, lr=lr) for lr in wanted if lr not in own]
        return new

    return search


#: Powers of ten in eighths: of a learning rate, and of a damping where an arm has one.
Point = tuple[int, ...]
#: Neighbours are a factor of 3.2 apart at first, then 1.8, then 1.3; the trials that are left lie between and beyond.
SPREADS = (4, 2, 1, 3, 6, 5, 8)


def eighths(value: float) -> int:
    """The eighths of the nearest power of ten."""
    return round(8 * math.log10(value))


def neighbours(point: Point, spread: int) -> list[Point]:
    """The points beside a point, along one axis each; the learning rate's come first."""
    return [
        (*point[:axis], point[axis] + sign * spread, *point[axis + 1 :])
        for axis in range(len(point))
        for sign in (-1, 1)
    ]


def proposals(start: Point, tried: Mapping[Point, float], trials: int) -> list[Point]:
    """The points to try next: around the best, closer once it has all its neighbours; none once the search is over.

    A search has so many trials, and more only while the best learning rate is the lowest or the highest tried.

    Example:
        >>> proposals((0,), {}, 4)
        [(0,), (-4,), (4,)]
        >>> proposals((0,), {(0,): 2.0, (-4,): 3.0, (4,): 1.0}, 4)
        [(8,)]
        >>> proposals((0,), {(0,): 2.0, (-4,): 3.0, (4,): 1.0, (8,): 2.0}, 4)
        []
    """
    if not tried:
        return [start, *neighbours(start, SPREADS[0])][:trials]
    best = min(tried, key=lambda point: tried[point])
    for spread in SPREADS:
        if new := [point for point in neighbours(best, spread) if point not in tried]:
            break
    left = trials - len(tried)
    if left > 0:
        return new[:left]
    rates = {point[0] for point in tried}
    inside = min(rates) < best[0] < max(rates)
    return [] if inside else [point for point in neighbours(best, SPREADS[0])[:2] if point not in tried]


def around(run: Any, trials: int) -> Search:
    """So many trials around a run's learning rate, and its damping unless that is None; see `proposals`."""

    def point(one: Any) -> Point:
        return tuple(eighths(v) for v in (one.lr, one.damping) if v is not None)

    def at(place: Point) -> Any:
        rate, *damping = (float(f"{10 ** (power / 8):.2g}") for power in place)
        return replace(run, lr=rate, damping=damping[0] if damping else None)

    def search(tried: Tried) -> list[Any]:
        return [at(place) for place in proposals(point(run), {point(one): own for one, own in tried.items()}, trials)]

    return search
