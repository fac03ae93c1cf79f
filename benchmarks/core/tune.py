"""The search for a learning rate and a damping that gives every arm of a comparison as many trials."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .progress import Kind, R, run_all
from .store import Store

#: Powers of ten in eighths: of a learning rate, and of a damping where an arm has one.
Point = tuple[int, ...]
#: Neighbours are a factor of 3.2 apart at first, then 1.8, then 1.3; the trials that are left lie between and beyond.
SPREADS = (4, 2, 1, 3, 6, 5, 8)


def value(eighths: int) -> float:
    """A power of ten, rounded to two digits."""
    return float(f"{10 ** (eighths / 8):.2g}")


def eighths(value: float) -> int:
    """The inverse of `value`."""
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


def tune(
    runs: Sequence[R], kind: Kind, store: Store, loss: Callable[[Any], float], *,
    trials: int, each: Callable[[R], Sequence[R]] = lambda run: [run],
) -> list[R]:  # fmt: skip
    """Give every run the learning rate and damping that won its search, which begins at its own.

    Args:
        runs: the first trial of every arm; damping None is an arm that has none.
        kind: how runs are made.
        store: where trials are kept, as the part "search".
        loss: of a score, which is None where a run broke down.
        trials: how many every arm has.
        each: the runs that make one trial, whose losses are averaged.
    """

    def at(run: Any, point: Point) -> Any:
        rate, *damping = map(value, point)
        return replace(run, lr=rate, damping=damping[0] if damping else None)

    starts: list[Point] = [tuple(eighths(v) for v in (run.lr, run.damping) if v is not None) for run in runs]  # type: ignore[attr-defined]
    tried: list[dict[Point, float]] = [{} for _ in runs]
    while True:
        new = [proposals(start, own, trials) for start, own in zip(starts, tried, strict=True)]
        if not any(new):
            return [at(run, min(own, key=own.__getitem__)) for run, own in zip(runs, tried, strict=True)]
        asked = [(run, own, point) for run, own, points in zip(runs, tried, new, strict=True) for point in points]
        run_all([one for run, _, point in asked for one in each(at(run, point))], kind, store, part="search")
        scores = {result["key"]: result["score"] for result in store.read("search")}
        for run, own, point in asked:
            found = [scores[one.key("search")] for one in each(at(run, point))]
            own[point] = math.inf if None in found else statistics.fmean(map(loss, found))
