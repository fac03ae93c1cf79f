"""The paper's Table 1: accuracy and its slope over batch sizes, and what it leaves open, read otherwise."""

import math
import statistics
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import linregress, t

from ..core.figure import bars, panels
from ..core.store import Result, setting
from ..core.study import Recipe, apart
from ..core.tables import Cell, Section, Table, estimate, grouped, in_order, mean_and_error, pivot, spearman
from ..grids import PAPERS, Grid, grid_study, presets
from ..methods import METHODS
from ..problems.images import ACTIVATIONS, DEPARTURES, subject, trained

#: Bird 2025, Table 1: (mean accuracy over batch sizes, its error, slope, its error), after 100 epochs. The BatchNorm
#: accuracy is that of the text where the table is misprinted.
PAPER = {
    ("none", "tanh"): (38.35, 0.50, 5.80e-2, 1.17e-2),
    ("batchnorm", "tanh"): (39.08, 0.87, 5.04e-2, 1.21e-2),
    ("layernorm", "tanh"): (43.72, 0.21, -8.77e-3, 2.45e-3),
    ("rmsnorm", "tanh"): (27.31, 1.87, 1.05e-1, 0.21e-1),
    ("l2norm", "tanh"): (49.93, 0.10, -2.98e-2, 0.20e-2),
    ("l2norm-half", "tanh"): (48.42, 0.35, -2.58e-2, 0.53e-2),
    ("affine-like", "tanh"): (50.56, 0.13, -2.45e-2, 0.17e-2),
    ("none", "leaky-relu"): (47.56, 0.07, 5.51e-3, 2.83e-3),
    ("batchnorm", "leaky-relu"): (45.54, 0.67, 3.56e-2, 0.86e-2),
    ("layernorm", "leaky-relu"): (45.59, 0.15, -8.58e-3, 3.00e-3),
    ("rmsnorm", "leaky-relu"): (49.15, 0.21, -5.38e-3, 2.45e-3),
    ("l2norm", "leaky-relu"): (48.50, 0.22, 0.71e-4, 37.42e-4),
    ("l2norm-half", "leaky-relu"): (48.74, 0.04, -6.19e-3, 1.00e-3),
    ("affine-like", "leaky-relu"): (49.80, 0.23, -4.19e-3, 3.32e-3),
}

#: The paper's batch sizes.
SIZES = [8, 16, 32, 64, 128]


def series(results: list[Result]) -> dict[tuple[str, str], dict[int, list[float]]]:
    """(method, activation) → batch size → accuracy of every seed after the last epoch."""
    size = setting("batch_size")
    groups = grouped(sorted(results, key=size), setting("method", "activation"))
    return {key: {size(r): r["test_accuracy"][-1] for r in found} for key, found in groups.items()}


class Line(NamedTuple):
    """A least squares line of accuracy over batch size; error and p are of the seeds' own slopes."""

    slope: float
    intercept: float
    stderr: float
    pvalue: float


def line(by_size: dict[int, list[float]]) -> Line | None:
    """The mean of the lines through each seed's accuracies, if there are three batch sizes."""
    if len(by_size) < 3:
        return None
    lines = [linregress(list(by_size), seed) for seed in zip(*by_size.values(), strict=True)]
    found = [float(each.slope) for each in lines]
    slope, error = mean_and_error(found)
    p = 2 * float(t.sf(abs(slope) / error, len(found) - 1)) if error > 0 else math.nan  # Student's test of the slopes
    return Line(slope, mean_and_error([float(each.intercept) for each in lines])[0], error, p)


def over_sizes(by_size: dict[int, list[float]]) -> list[float]:
    """Every seed's mean over batch sizes."""
    return [math.fsum(seed) / len(by_size) for seed in zip(*by_size.values(), strict=True)]


def ranked(results: list[Result], activation: str) -> Any:
    """Spearman's ρ with the paper's means of the methods that are there at every batch size."""
    found = series(results)
    methods = [name for name in METHODS if (name, activation) in PAPER]
    methods = [name for name in methods if len(found.get((name, activation), {})) == len(SIZES)]
    ours = [math.fsum(over_sizes(found[name, activation])) for name in methods]
    paper = [PAPER[name, activation][0] for name in methods]
    return spearman(ours, paper)


def table(results: list[Result]) -> Table:
    """Accuracy at every batch size and, once all of these are there, its mean and slope, beside the paper's."""
    found, rows = series(results), list[dict[str, str | Cell]]()
    sizes = sorted({size for by_size in found.values() for size in by_size})
    for activation, method in product(ACTIVATIONS, METHODS):
        by_size, paper = found.get((method, activation), {}), PAPER.get((method, activation))
        fitted = line(by_size) if set(by_size) == set(sizes) else None
        rows.append({
            "activation": activation, "method": METHODS[method].label,
            **{str(size): estimate(by_size[size]) if size in by_size else "" for size in sizes},
            "mean": estimate(over_sizes(by_size)) if set(by_size) == set(sizes) else "",
            "slope, 10⁻²": _slope(fitted.slope, fitted.stderr, p=fitted.pvalue) if fitted else "",
            "paper: mean": _with_error(*paper[:2]) if paper else "",
            "paper: slope, 10⁻²": _slope(*paper[2:]) if paper else "",
        })  # fmt: skip
    return Table.of([row for row in rows if any(row[str(size)] for size in sizes)])


def _with_error(value: float, error: float, **more: float) -> Cell:
    return Cell(f"{value:.2f} ± {error:.2f}", {"": value, "error": error, **more})


def _slope(slope: float, error: float, **more: float) -> Cell:
    return _with_error(100 * slope, 100 * error, **more)


#: A method whose mean is below this share of the best one's has collapsed, and is drawn on a scale of its own.
COLLAPSED = 0.7


def draw(results: list[Result], title: str, path: Path) -> None:
    """Draw accuracy by batch size beside the fitted lines, panels for each activation; the paper's lines are dotted."""
    found, drawn = series(results), list[tuple[bool, str, str]]()  # whether it has collapsed, activation, method
    activations = in_order(ACTIVATIONS, (key[1] for key in found))
    for activation in activations:
        own = in_order(METHODS, (name for name, other in found if other == activation))
        means = {name: statistics.fmean(over_sizes(found[name, activation])) for name in own}
        drawn += [(mean < COLLAPSED * max(means.values()), activation, name) for name, mean in means.items()]
    by_panel = grouped(sorted(drawn, key=lambda each: each[0]), lambda each: each[1] + ", collapsed" * each[0])
    look: dict[str, Any] = {"sharey": False, "xlabel": "batch size", "ylabel": "test accuracy, %"}
    with panels([*by_panel], title, path, columns=len(activations), height=2.9, **look) as axes:
        for axis, lines in zip(axes, by_panel.values(), strict=True):
            for _, activation, name in lines:
                by_size, color = found[name, activation], METHODS[name].color
                bars(axis, by_size, METHODS[name])
                # A line in batch size is a curve over its logarithm.
                if fitted := line(by_size):
                    xs = np.linspace(min(by_size), max(by_size))
                    axis.plot(xs, fitted.intercept + fitted.slope * xs, color=color, linewidth=4, alpha=0.25)
                if theirs := PAPER.get((name, activation)):
                    xs = np.linspace(SIZES[0], SIZES[-1])
                    axis.plot(xs, theirs[0] + theirs[2] * (xs - math.fsum(SIZES) / 5), ":", color=color, linewidth=1.0)
            axis.set_xscale("log", base=2)
            axis.set_xticks(SIZES, [str(size) for size in SIZES])
        axes[-1].plot([], [], color="0.5", linewidth=4, alpha=0.25, label="fitted line; bars: ± one standard error")
        axes[-1].plot([], [], ":", color="0.3", label="the paper's line")


#: From the largest batch on, which is the soonest done.
_PAPER: Grid = {**PAPERS, "batch_size": SIZES[::-1]}


def _section(there: list[Result], name: str, folder: Path) -> Section:
    """Table and figure of one length."""
    heading = f"{subject(there[:1])}, {there[0]['settings']['epochs']} epochs: the paper's Table 1"
    draw(there, heading, folder / f"{name}.png")
    return Section([f"**{heading}**", table(there), f"Test accuracy in per cent by batch size. {trained(there)}"])


#: What the paper leaves open, read otherwise.
_DEPARTURES: Grid = {
    **PAPERS, "method": ["none", "affine-like"], "activation": ["tanh"], "batch_size": 128, "seeds": 3,
    "departure": [None, *DEPARTURES],
}  # fmt: skip


def _departures(results: list[Result], name: str, folder: Path) -> Section:
    """A row for every departure that is there."""
    settings = results[0]["settings"]
    at = {(r["settings"].get("departure"), r["settings"]["method"]): r["test_accuracy"][-1] for r in results}
    rows: dict[Any, str] = {None: "as in the tables above", **DEPARTURES}
    cells = {key: estimate(accuracies) for key, accuracies in at.items()}
    columns = {name: method.label for name, method in METHODS.items()}
    heading = f"{subject(results)}, batch {settings['batch_size']}, {settings['activation']}"
    caption = f"Test accuracy in per cent. {trained(results)}"
    return Section([f"**{heading}, {settings['epochs']} epochs**", pivot([""], rows, columns, cells), caption])


_LONG = "--epochs 100 --seeds 5 --departure none centred --methods affine-like"
_PAGE = "docs/results/mlp.md"
STUDIES = {
    "table1": grid_study(
        "the paper's Table 1, Figs. 6 and 7: accuracy and slope over batch sizes",
        presets([_PAPER], [{**_PAPER, "epochs": 20, "seeds": 3}]),
        apart(_section, "method", "activation", "batch_size", "backend"),
        makes=[Recipe(20, options=("--preset paper",)), Recipe(8, "table1-reduced", ("--preset reduced",))],
        page=_PAGE,
    ),
    "departures": grid_study(
        "what the paper's Table 1 leaves open, read otherwise",
        [_DEPARTURES], apart(_departures, "departure", "method", "backend"), page=_PAGE,
        makes=[Recipe(0.2), Recipe(0.5, "departures-long", (_LONG,))],
    ),
}  # fmt: skip
