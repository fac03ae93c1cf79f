"""What every figure of results is made of."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

from ..methods import Method
from .tables import mean_and_error


def band(axis: Any, x: Sequence[float], values: Sequence[Sequence[float]], style: str = "-", **look: Any) -> None:
    """Draw the means of some seeds' values at every x, and around them a band, which the legend names."""
    means, errors = np.array([mean_and_error(each) for each in values]).reshape(-1, 2).T
    (line,) = axis.plot(x, means, style, **look)
    shade(axis, x, means - errors, means + errors, line.get_color(), "band: ± one standard error")


def bars(axis: Any, values: Mapping[Any, Sequence[float]], method: Method) -> None:
    """Draw the means of a method's seeds by their places, with bars of one standard error; gradient-only is dashed."""
    means, errors = zip(*map(mean_and_error, values.values()), strict=True)
    look = {"color": method.color, "fmt": "o--" if method.correction else "o-", "label": method.label}
    axis.errorbar(list(values), means, errors, **look, markersize=4, capsize=2)


def shade(axis: Any, x: Sequence[float], low: Any, high: Any, color: Any, what: str) -> None:
    """Fill what lies between two curves, and have the legend say what that is."""
    axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    axis.fill_between([], [], [], color="0.5", alpha=0.3, linewidth=0, label=what)


def seaborn(plot: Callable[..., Any], axis: Any, frame: pd.DataFrame, **look: Any) -> None:
    """Draw a frame by a plot of seaborn, whose options these are; legend and labels are those of `panels`."""
    plot(frame, ax=axis, **look)
    if legend := axis.get_legend():
        legend.remove()
    axis.set(xlabel="", ylabel="")


@contextmanager
def panels(
    names: Sequence[str], title: str, path: Path, *,
    columns: int | None = None, height: float = 3.4, sharey: bool = True, ylabel: str = "", **look: Any,
) -> Iterator[Sequence[Any]]:  # fmt: skip
    """Yield one axis per name, in rows of at most three with one legend below, and write the figure to `path`.

    Every row has the label of its vertical axis once; the rest is set of all panels, as `xlabel` and `xscale` are.
    """
    columns = columns or (len(names) if len(names) < 4 else 2 if len(names) == 4 else 3)
    rows = -(-len(names) // columns)
    # At the 850 pixels that a page shows of these inches, letters of 10 points are 12 pixels high.
    fig, grid = plt.subplots(
        rows, columns, figsize=(9.6, height * rows + 1.2), sharey=sharey, squeeze=False, layout="constrained"
    )
    axes, spare = list(grid.flat)[: len(names)], list(grid.flat)[len(names) :]
    with saved(fig, path):
        yield axes
        for axis, name in zip(axes, names, strict=True):
            # Scales behind what is drawn, from which they have their limits; one that is there keeps its ticks.
            new = {key: value for key, value in look.items() if value != getattr(axis, f"get_{key}")()}
            axis.set(title=name, **new)
            axis.grid(alpha=0.3)
        for axis in spare:
            axis.set_visible(False)
        for row in grid:
            row[0].set_ylabel(row[0].get_ylabel() or ylabel)
        # A method may be in some of the panels only.
        drawn = (pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True))
        handles = {label: handle for handle, label in drawn}
        # What names no line comes last.
        handles = dict(sorted(handles.items(), key=lambda each: each[0].startswith(("band", "thin"))))
        ncols = 3 if max(map(len, handles), default=0) <= 40 else 2  # characters of the longest label
        fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols, frameon=False)
        # A long legend makes the figure higher, and not its panels lower.
        fig.set_figheight(fig.get_figheight() + 0.21 * max(0, len(handles) / ncols - 5))
        # What is longer than a line is broken between phrases, and not within brackets.
        lines = re.sub(r"(.{1,100}[,:]) (?![^\[(]*[\])])", r"\1\n", title, count=1) if len(title) > 101 else title
        fig.suptitle(lines, fontsize=11)


@contextmanager
def saved(fig: Any, path: Path) -> Iterator[None]:
    """Write a figure to `path` once it is drawn, and forget it."""
    try:
        yield
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=130)
    finally:
        plt.close(fig)
