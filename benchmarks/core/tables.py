"""What every table of results is made of: cells, their text for a page, and the frame of unrounded numbers behind."""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from scipy.stats import permutation_test, rankdata, spearmanr, ttest_1samp, ttest_ind

#: What p has to be below for a difference to count.
SIGNIFICANT = 0.05

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard error of the mean (NaN for a single value)."""
    mean = fmean(values)
    if len(values) == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


class Difference(NamedTuple):
    """The mean of some numbers minus that of others, by a t test."""

    mean: float
    p: float
    low: float  # of the interval of 95 %
    high: float
    n: str  # of pairs, or of each


def welch(sample: Sequence[float], other: Sequence[float]) -> Difference:
    """The difference by Welch's test."""
    test = ttest_ind(sample, other, equal_var=False)
    mean, (low, high) = fmean(sample) - fmean(other), test.confidence_interval(0.95)
    return Difference(mean, float(test.pvalue), float(low), float(high), f"{len(sample)}, {len(other)}")


def paired(sample: Mapping[K, float], other: Mapping[K, float], shown: Callable[[float], float]) -> Difference:
    """The difference of what is shown of two errors, over the problems of both; NaN where either is infinite."""
    pairs = [(sample[key], other[key]) for key in sample if key in other]
    differences = [shown(a) - shown(b) if math.isfinite(a) and math.isfinite(b) else math.nan for a, b in pairs]
    mean, n = fmean(differences) if pairs else math.nan, str(len(pairs))
    if len(pairs) < 2:
        return Difference(mean, math.nan, math.nan, math.nan, n)
    test = ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(0.95)
    return Difference(mean, float(test.pvalue), float(low), float(high), n)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's p of several tests: each p times how many are not smaller, and no less than those of smaller ones.

    Example:
        >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03, 0.005])]
        [0.03, 0.06, 0.06, 0.02]
    """
    order, corrected = np.argsort(values, kind="stable"), np.empty(len(values))
    corrected[order] = np.maximum.accumulate(np.minimum(1, np.sort(values) * np.arange(len(values), 0, -1)))
    return [float(p) for p in corrected]


def spearman(x: Sequence[float], y: Sequence[float]) -> Any:
    """Spearman's ρ of pairs; p is of all permutations of up to eight of them, where its approximation is far off."""
    if len(x) > 8:
        return spearmanr(x, y)
    left, right = (rankdata(values) - (len(x) + 1) / 2 for values in (x, y))
    length = math.sqrt(left @ left * (right @ right))
    return permutation_test(
        (left,), lambda order, axis: (order * right).sum(axis) / length, permutation_type="pairings", n_resamples=np.inf
    )


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by their keys, both in the order in which they come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def in_order(known: Iterable[str], there: Iterable[str]) -> list[str]:
    """The names that are there, in the order in which they are known."""
    present = set(there)
    return [name for name in known if name in present]


class Cell(NamedTuple):
    """What a page shows, and the numbers that it is made of."""

    text: str
    numbers: Mapping[str, Any]  # what is put behind the column's header, as "n" and "p" are → number


Row = Sequence[str | Cell]


def exact(value: float | None, spec: str = "g") -> Cell:
    """A cell with one number; None leaves it empty."""
    return Cell("", {}) if value is None else Cell(format(value, spec), {"": value})


def estimate(values: Sequence[float], digits: int = 2) -> Cell:
    """A cell with mean ± standard error; of a single value by itself."""
    mean, error = mean_and_error(values)
    if len(values) == 1:
        return Cell(f"{mean:.{digits}f}", {"": mean, "n": 1})
    return Cell(f"{mean:.{digits}f} ± {error:.{digits}f}", {"": mean, "error": error, "n": len(values)})


def ranged(low: float, middle: float, high: float, spec: str = ".2g", **more: Any) -> Cell:
    """A cell with a middle, and in brackets the ends that it lies between."""
    text = f"{middle:{spec}} ({low:{spec}} to {high:{spec}})"
    return Cell(text, {"": middle, "low": low, "high": high, **more})


def against(own: Sequence[float], other: Sequence[float], form: str = "{:+.2f} ({:.2g})") -> Cell:
    """A cell with the difference of the means and Welch's p."""
    difference = welch(own, other)
    return Cell(form.format(difference.mean, difference.p), {"": difference.mean, "p": difference.p})


@dataclass(frozen=True)
class Table:
    """A table, whole; pages show the rows that are worth it.

    Example:
        >>> table = Table(["arm", "loss (p)"], [["Adam", Cell("1.5 (0.01)", {"": 1.5, "p": 0.01})], ["SGD", ""]])
        >>> print(table.markdown())
        | arm | loss (p) |
        | --- | --- |
        | Adam | 1.5 (0.01) |
        | SGD |  |
        >>> table.frame.columns.tolist()
        ['arm', 'loss', 'loss p']
    """

    header: Sequence[str]
    rows: Sequence[Row]
    worth: Sequence[bool] | None = None  # which rows a page shows; None is all, and an empty list no table
    name: str = ""  # what tells it from the other tables of its section

    @classmethod
    def of(cls, records: Sequence[Mapping[str, str | Cell]], **more: Any) -> "Table":
        """A row for each record, title → cell; a column without a number or text in any of them is left out."""
        header = [title for title in records[0] if any(_numbers(record[title]) for record in records)]
        return cls(header, [[record[title] for title in header] for record in records], **more)

    def markdown(self, *, short: bool = False, without: Collection[str] = ()) -> str:
        """The table for a page, whole or short, without some columns."""
        shown = self.worth if short and self.worth is not None else [True] * len(self.rows)
        kept = [at for at, title in enumerate(self.header) if title not in without]
        rows = [[row[at] for at in kept] for row, is_worth in zip(self.rows, shown, strict=True) if is_worth]
        return markdown([self.header[at] for at in kept], rows)

    @property
    def frame(self) -> pd.DataFrame:
        """The whole table, unrounded: a column for each number behind a header, and one for text."""
        columns = dict.fromkeys((at, name) for at in range(len(self.header)) for row in self.rows
                                for name in _numbers(row[at]))  # fmt: skip
        values = [[_numbers(row[at]).get(name, "") for at, name in columns] for row in self.rows]
        titles = [_plain(title).removesuffix(" (p)") for title in self.header]
        return pd.DataFrame(values, columns=[f"{titles[at]} {name}".strip() for at, name in columns], dtype=object)

    def csv(self) -> str:
        """The frame as a file."""
        return self.frame.to_csv(index=False, lineterminator="\n")


def pivot(
    head: Sequence[str],
    rows: Mapping[Any, str | Row],
    columns: Mapping[Any, str],
    cells: Mapping[tuple[Any, Any], str | Cell],
) -> Table:
    """A table of what was measured at some rows and columns, (row, column) → cell; where nothing was, it is empty.

    A row has a label or several, under `head`, and a column a header; those without a cell are left out.
    """
    there = {row for row, _ in cells}
    titles = {column: title for column, title in columns.items() if any(column == other for _, other in cells)}
    named = {row: [each] if isinstance(each, str) else each for row, each in rows.items() if row in there}
    whole = [[*each, *(cells.get((row, column), "") for column in titles)] for row, each in named.items()]
    return Table([*head, *titles.values()], whole)


def _numbers(cell: str | Cell) -> Mapping[str, Any]:
    if isinstance(cell, Cell):
        return cell.numbers
    return {"": _plain(cell)} if cell else {}


def _plain(text: str) -> str:
    return text.replace("**", "").replace("`", "").replace("\\|", "|")


@dataclass(frozen=True)
class Section:
    """What is reported under one name: headings, tables and captions in their order."""

    parts: Sequence[Any]  # texts and tables

    @property
    def tables(self) -> list[Table]:
        """The tables among the parts."""
        return [part for part in self.parts if not isinstance(part, str)]

    @property
    def text(self) -> str:
        """All of it, every table whole."""
        return "\n\n".join(part if isinstance(part, str) else part.markdown() for part in self.parts)

    def on_page(self, links: str, *, without: Collection[str] = ()) -> str:
        """What a page shows, with links to the whole tables below it: the rows worth it of each table."""
        shown = [part if isinstance(part, str) else part.markdown(short=True, without=without) for part in self.parts
                 if isinstance(part, str) or part.worth != []]  # fmt: skip
        before_links = " " if isinstance(self.parts[-1], str) else "\n\n"
        return "\n\n".join(shown) + (before_links + links if links else "")


def markdown(header: Sequence[str], rows: Iterable[Row]) -> str:
    """A Markdown table."""
    cells = ([cell if isinstance(cell, str) else cell.text for cell in row] for row in rows)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *cells))


def machine(environment: Mapping[str, Any], device: str = "cpu") -> str:
    """Where something was measured, for the end of a caption."""
    where = environment["gpu"] if device.startswith("cuda") else environment["processor"]
    return f"{where}, {environment['threads']} thread(s), torch {environment['torch']}."
