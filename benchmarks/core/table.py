"""What every table of results is made of."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from scipy.stats import ttest_ind

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard error of the mean (NaN for a single value)."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def plus_minus(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± standard error; a single value by itself."""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def welch(own: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Difference of the means, and p of Welch's test."""
    difference = mean_and_error(own)[0] - mean_and_error(other)[0]
    return difference, float(ttest_ind(own, other, equal_var=False).pvalue)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by their keys, both in the order in which they come."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def in_order(known: Iterable[str], there: Iterable[str]) -> list[str]:
    """What is there, in the order in which it is known."""
    found = set(there)
    return [name for name in known if name in found]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def machine(environment: Mapping[str, Any], device: str = "cpu") -> str:
    """Where something was measured, for the end of a caption."""
    where = environment["gpu"] if device.startswith("cuda") else environment["processor"]
    return f"{where}, {environment['threads']} thread(s), torch {environment['torch']}."
