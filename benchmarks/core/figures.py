"""Figures of results: seaborn draws them from frames, and here they are finished alike."""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import seaborn as sns

from ..methods import METHODS

#: Of every figure, in inches: at the 850 pixels that a page shows, letters of 10 points are 12 pixels high.
WIDTH = 9.6


def palette(methods: Iterable[str]) -> dict[str, str]:
    """The colours of methods by their labels."""
    return {METHODS[name].label: METHODS[name].color for name in methods}


def facets(panels: int, height: float = 3.4, columns: int | None = None) -> dict[str, Any]:
    """Options of a seaborn figure of so many panels, in rows of at most three; `height` is of a row, in inches."""
    columns = columns or (panels if panels < 4 else 2 if panels == 4 else 3)
    return {"col_wrap": columns, "height": height, "aspect": WIDTH / columns / height}


def finished(
    grid: sns.FacetGrid, title: str, path: Path, *, ylabel: str = "", titles: str = "{col_name}", **look: Any
) -> None:
    """Give a figure its title and a legend below its panels, and write it to `path`.

    Args:
        grid: what seaborn drew.
        title: broken into lines between phrases.
        path: of the picture.
        ylabel: beside the first panel of every row.
        titles: of the panels, as `FacetGrid.set_titles` has them.
        look: properties of all axes, such as `xscale` and `xlabel`.
    """
    try:
        grid.set_titles(titles)
        grid.set(**look)
        grid.set_ylabels(ylabel)
        for axis in grid.axes.flat:
            axis.grid(alpha=0.3)
        rows = len({axis.get_subplotspec().rowspan.start for axis in grid.axes.flat})
        handles = {
            label: handle
            for axis in grid.axes.flat
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        if grid.legend is not None:
            texts = [text.get_text() for text in grid.legend.texts]
            handles = dict(zip(texts, grid.legend.legend_handles, strict=True)) | handles
            grid.legend.remove()
        grid.figure.set_layout_engine("constrained")
        grid.figure.set_size_inches(WIDTH, grid.figure.get_figheight() + 0.6 + 0.22 * -(-len(handles) // 3) / rows)
        if handles:
            grid.figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
        grid.figure.suptitle(wrapped(title, 101), fontsize=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        grid.figure.savefig(path, dpi=130)
    finally:
        plt.close(grid.figure)


def wrapped(title: str, width: int) -> str:
    r"""A title in lines of at most `width` characters, broken between phrases alone.

    Example:
        >>> wrapped("CIFAR-10, [3072, 32, 10], batch 32: rates", 25)
        'CIFAR-10, [3072, 32, 10],\nbatch 32: rates'
    """
    # A space within a phrase is one that lines are not broken at, until they are.
    phrases = re.sub(r"(?<![,:]) | (?=[^\[(]*[\])])", "\N{NO-BREAK SPACE}", title)
    lines = textwrap.wrap(phrases, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")
