"""Tables as lists of cells, until all studies have frames; see `tables`."""

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import tables
from .tables import SIGNIFICANT as SIGNIFICANT
from .tables import Correlation as Correlation
from .tables import Section as Section
from .tables import grouped as grouped
from .tables import in_order as in_order
from .tables import machine as machine
from .tables import mean_and_error as mean_and_error
from .tables import plus_minus as plus_minus
from .tables import spearman as spearman
from .tables import welch as welch


class Cell(NamedTuple):
    """What a page shows, and the numbers that it is made of."""

    text: str
    numbers: Mapping[str, Any]  # what is put behind the column's header, as "n" and "p" are → number

    def bold(self) -> "Cell":
        """The cell in bold type."""
        return self._replace(text=f"**{self.text}**")


Row = Sequence[str | Cell]


def exact(value: float | None, spec: str = "g") -> Cell:
    """A cell with one number; None leaves it empty."""
    return Cell("", {}) if value is None else Cell(format(value, spec), {"": value})


def estimate(values: Sequence[float], digits: int = 2) -> Cell:
    """A cell with mean ± standard error."""
    return Cell(plus_minus(values, digits), spread(values))


def spread(values: Sequence[float]) -> dict[str, float]:
    """The numbers behind a mean: itself, its standard error, and n."""
    mean, error = mean_and_error(values)
    return {"": mean, "error": error, "n": len(values)} if len(values) > 1 else {"": mean, "n": 1}


def against(own: Sequence[float], other: Sequence[float], form: str = "{:+.2f} ({:.2g})") -> Cell:
    """A cell with the difference of the means and Welch's p."""
    difference, p = welch(own, other)
    return Cell(form.format(difference, p), {"": difference, "p": p})


@dataclass(frozen=True)
class Table:
    """A table, whole; pages show the rows that are worth it."""

    header: Sequence[str]
    rows: Sequence[Row]
    worth: Sequence[bool] | None = None  # which rows a page shows; None is all, and an empty list no table
    name: str = ""  # what tells it from the other tables of its section
    heading: str = ""  # of itself alone

    def markdown(self, *, short: bool = False, without: Collection[str] = ()) -> str:
        """The table for a page, whole or short, without some columns."""
        shown = self.worth if short and self.worth is not None else [True] * len(self.rows)
        kept = [at for at, title in enumerate(self.header) if title not in without]
        rows = [[row[at] for at in kept] for row, worth in zip(self.rows, shown, strict=True) if worth]
        text = markdown([self.header[at] for at in kept], rows)
        return f"**{self.heading}**\n\n{text}" if self.heading else text

    def csv(self) -> str:
        """The whole table, unrounded: a column for every number behind a header, and one for what is text."""
        columns: dict[tuple[int, str], None] = {}
        rows = [[_numbers(cell) for cell in row] for row in self.rows]
        for at in range(len(self.header)):
            columns |= dict.fromkeys((at, name) for row in rows for name in row[at])
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        titles = [_plain(title).removesuffix(" (p)") for title in self.header]
        writer.writerow([f"{titles[at]} {name}".strip() for at, name in columns])
        writer.writerows([[row[at].get(name, "") for at, name in columns] for row in rows])
        return text.getvalue()


def pivot(
    head: Sequence[str],
    rows: Mapping[Any, Row],
    columns: Mapping[Any, str],
    cells: Mapping[tuple[Any, Any], str | Cell],
) -> Table:
    """A table of what was measured at every row and column; where nothing was, it is empty.

    Args:
        head: over the labels of the rows.
        rows: row → its labels.
        columns: column → its header.
        cells: (row, column) → what stands there.
    """
    whole = [[*labels, *(cells.get((row, column), "") for column in columns)] for row, labels in rows.items()]
    return Table([*head, *columns.values()], whole)


def _numbers(cell: str | Cell) -> Mapping[str, Any]:
    if isinstance(cell, Cell):
        return cell.numbers
    return {"": _plain(cell)} if cell else {}


def _plain(text: str) -> str:
    return text.replace("**", "").replace("`", "").replace("\\|", "|")


def markdown(header: Sequence[str], rows: Any) -> str:
    """A Markdown table."""
    return tables.markdown(header, [[cell if isinstance(cell, str) else cell.text for cell in row] for row in rows])
