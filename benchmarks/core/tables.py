"""What every table of results is made of: a frame of unrounded numbers, and how a page shows them."""

import math
import string
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from scipy.stats import permutation_test, rankdata, spearmanr, ttest_ind

#: What p has to be below for a difference to count.
SIGNIFICANT = 0.05

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
#: A cell of a page: a format of the columns of a frame, or pieces of one, which are left out where a number is missing.
Cell = str | Sequence[str]


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


def welch(sample: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Difference of the means, and p of Welch's test."""
    difference = mean_and_error(sample)[0] - mean_and_error(other)[0]
    return difference, float(ttest_ind(sample, other, equal_var=False).pvalue)


class Correlation(NamedTuple):
    """A rank correlation, and p of the permutations that are at least as strong."""

    statistic: float
    pvalue: float


def spearman(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """Spearman's ρ of pairs; p is of all permutations of up to eight of them, where its approximation is far off."""
    if len(x) > 8:
        return Correlation(*map(float, spearmanr(x, y)))
    left, right = (rankdata(values) - (len(x) + 1) / 2 for values in (x, y))
    exact = permutation_test(
        (left,), lambda order, axis: (order * right).sum(axis), permutation_type="pairings", n_resamples=np.inf
    )
    return Correlation(float(left @ right) / math.sqrt(float(left @ left) * float(right @ right)), float(exact.pvalue))


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


class Words(str):
    """Words where other rows have a number: formats of numbers leave them as they are.

    Example:
        >>> f"{Words('diverged'):.3f}"
        'diverged'
    """

    def __format__(self, spec: str) -> str:
        return str(self)


def spread(title: str, values: Sequence[float]) -> dict[str, float]:
    """The columns of a sample: its mean, the standard error where there are several values, and n.

    Example:
        >>> spread("loss", [1.0, 3.0])
        {'loss': 2.0, 'loss error': 1.0, 'loss n': 2}
    """
    mean, error = mean_and_error(values)
    return {title: mean, f"{title} error": error, f"{title} n": len(values)} if len(values) > 1 else {
        title: mean, f"{title} n": 1}  # fmt: skip


def estimate(title: str, digits: int = 2) -> Cell:
    """A cell of a sample's mean ± standard error."""
    return f"{{{title}:.{digits}f}}", f" ± {{{title} error:.{digits}f}}"


@dataclass(frozen=True)
class Table:
    """A table: the whole of it as a frame, and the columns that pages show.

    Example:
        >>> rows = [{"arm": "Adam", **spread("loss", [1.0, 3.0])}, {"arm": "SGD", "loss": 4.0}]
        >>> print(Table.of(rows, {"arm": "{arm}", "test loss": estimate("loss", 1)}).markdown())
        | arm | test loss |
        | --- | --- |
        | Adam | 2.0 ± 1.0 |
        | SGD | 4.0 |
    """

    frame: pd.DataFrame  # unrounded; an empty cell is None
    columns: Mapping[str, Cell]  # header on a page → the cell below it
    worth: Sequence[bool] | None = None  # which rows a page shows; None is all, and an empty list no table
    name: str = ""  # what tells it from the other tables of its section
    heading: str = ""  # of itself alone

    @classmethod
    def of(
        cls, records: Iterable[Mapping[str, Any]], columns: Mapping[str, Cell] | None = None, **more: Any
    ) -> "Table":
        """A table of records, whose keys are the columns of the frame; pages show all as they are by default."""
        frame = pd.DataFrame(list(records), dtype=object)
        frame = frame.where(frame.notna(), None)
        return cls(frame, columns or {title: f"{{{title}}}" for title in frame}, **more)

    @property
    def header(self) -> list[str]:
        """The headers on a page."""
        return list(self.columns)

    def markdown(self, *, short: bool = False, without: Collection[str] = ()) -> str:
        """The table for a page, whole or short, without some columns."""
        cells = {title: cell for title, cell in self.columns.items() if title not in without}
        shown = self.worth if short and self.worth is not None else [True] * len(self.frame)
        records = [record for record, is_worth in zip(self.frame.to_dict("records"), shown, strict=True) if is_worth]
        text = markdown(list(cells), [[shown_as(cell, record) for cell in cells.values()] for record in records])
        return f"**{self.heading}**\n\n{text}" if self.heading else text

    def csv(self) -> str:
        """The whole table, unrounded, without columns that are empty."""
        return self.frame.dropna(axis="columns", how="all").map(_plain).to_csv(index=False, lineterminator="\n")


def shown_as(cell: Cell, record: Mapping[str, Any]) -> str:
    """The text of a cell; pieces of it are left out where a number is missing.

    Example:
        >>> shown_as(("{gain:+.1f}", " ({p:.2g})"), {"gain": 2.0})
        '+2.0'
    """
    pieces = [cell] if isinstance(cell, str) else cell
    return "".join(_FILL.vformat(piece, (), record) for piece in pieces if _is_there(piece, record))


_FILL = string.Formatter()
# A column's name may hold points and brackets, at which format strings look for attributes and items.
_FILL.get_field = lambda name, arguments, record: (record[name], name)  # type: ignore[assignment,method-assign]


def _is_there(piece: str, record: Mapping[str, Any]) -> bool:
    names = [name for _, name, *_ in string.Formatter().parse(piece) if name is not None]
    return not any(record.get(name) is None for name in names)


def _plain(value: Any) -> Any:
    """A cell without the marks of a page."""
    return value.replace("**", "").replace("`", "").replace("\\|", "|") if isinstance(value, str) else value


@dataclass(frozen=True)
class Section:
    """What is reported under one name: headings, tables and captions in their order."""

    parts: Sequence[Any]  # texts and tables
    verdict: str = ""  # what a command that made it ends with

    @property
    def tables(self) -> list[Table]:
        """The tables among the parts."""
        return [part for part in self.parts if not isinstance(part, str)]

    @property
    def text(self) -> str:
        """All of it, every table whole."""
        return "\n\n".join(part if isinstance(part, str) else part.markdown() for part in self.parts)

    def on_page(self, links: str, *, tables: bool, without: Collection[str] = ()) -> str:
        """What a page shows, with links to the whole tables below it: the rows worth it, or no table at all."""
        shown = [part if isinstance(part, str) else part.markdown(short=True, without=without) for part in self.parts
                 if isinstance(part, str) or (tables and part.worth != [])]  # fmt: skip
        if links and isinstance(self.parts[-1], str):
            shown[-1] += f" {links}"
        elif links:
            shown.append(links)
        return "\n\n".join(shown)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def machine(environment: Mapping[str, Any], device: str = "cpu") -> str:
    """Where something was measured, for the end of a caption."""
    where = environment["gpu"] if device.startswith("cuda") else environment["processor"]
    return f"{where}, {environment['threads']} thread(s), torch {environment['torch']}."
