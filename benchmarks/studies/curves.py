"""Curves of the language model's losses, for the studies that draw them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns

from examples.gpt import NORM_LABELS

from ..core.figures import facets, finished
from ..core.store import Result, setting
from ..core.tables import grouped
from ..methods import METHODS
from .texts import losses_of

#: The seeds of a line.
Seeds = list[Result]


def rows_of(results: Iterable[Result]) -> list[Seeds]:
    """The seeds of every combination of settings, in the order in which tables show them."""

    def place(result: Result) -> tuple[float, ...]:
        s = result["settings"]
        norm, method = list(NORM_LABELS).index(s["norm"]), list(METHODS).index(s["method"])
        return norm, s["steps"], method, s["lr"], s.get("damping", 0.0)

    return list(grouped(sorted(results, key=lambda each: (*place(each), each["settings"]["seed"])), place).values())


def _mean_loss(seeds: Seeds) -> float:
    return statistics.fmean(losses_of(seeds)[0])


def _longest(results: list[Result]) -> list[Seeds]:
    steps = max(result["settings"]["steps"] for result in results)
    return rows_of(result for result in results if result["settings"]["steps"] == steps)


def best_rows(results: list[Result]) -> dict[tuple[str, str], Seeds]:
    """(norm, method) → of the longest runs, the seeds at the lowest mean validation loss."""
    rows = grouped(_longest(results), lambda seeds: setting("norm", "method")(seeds[0]))
    return {key: min(several, key=_mean_loss) for key, several in rows.items()}


#: Methods in a panel.
_TOGETHER = 4


def best_first(results: list[Result]) -> dict[str, list[Seeds]]:
    """Panel → the seeds of each of its lines: of the longest runs and of every normaliser, the best first."""
    panels = {}
    for norm, rows in grouped(_longest(results), lambda seeds: seeds[0]["settings"]["norm"]).items():
        best = sorted(rows, key=_mean_loss)
        for place in range(0, len(best), _TOGETHER):
            together = best[place : place + _TOGETHER]
            which = f": {place + 1}{f' to {place + len(together)}' * (len(together) > 1)}" * (len(best) > _TOGETHER)
            panels[f"{NORM_LABELS[norm]}{which}"] = together
    return panels


def curve(seeds: Seeds) -> pd.DataFrame:
    """Steps and validation loss of every seed, as far as all of them have one."""
    frame = pd.concat([
        pd.DataFrame({"steps": r["steps"], "loss": r["validation_loss"], "seed": r["settings"]["seed"]}) for r in seeds
    ])  # fmt: skip
    counts = frame.dropna().groupby("steps")["loss"].count()
    return frame[frame["steps"].isin(counts[counts == len(seeds)].index)].astype({"loss": float})


def draw(
    panels: Mapping[str, Sequence[Seeds]], title: str, path: Path, ratios: Mapping[str, Any] | None = None
) -> None:
    """Draw the end of validation loss against steps, or against time.

    Args:
        panels: the seeds of each line.
        title: of the figure.
        path: of the picture.
        ratios: method → the time of its step, in steps of AdamW.
    """
    alike = setting("norm", "method", "steps")
    rates = grouped([seeds[0] for rows in panels.values() for seeds in rows], alike)
    curves, palette, dashes = list[pd.DataFrame](), dict[str, str](), dict[str, Any]()
    for panel, seeds in ((panel, seeds) for panel, rows in panels.items() for seeds in rows):
        method, rate = METHODS[seeds[0]["settings"]["method"]], seeds[0]["settings"]["lr"]
        # Methods with a damping are dashed: colour alone does not carry to everyone.
        label, dash = method.label, (4, 1.5) if method.damped else ""
        if len(others := [setting("lr")(each) for each in rates[alike(seeds[0])]]) > 1:
            label, dash = f"{label}, rate {rate:g}", "" if rate == min(others) else (1, 1)
        palette[label], dashes[label] = method.color, dash
        scale = ratios[seeds[0]["settings"]["method"]]["median"] if ratios else 1.0
        points = curve(seeds)
        curves.append(points.assign(panel=panel, line=label, at=scale * points["steps"]))
    frame = pd.concat(curves, ignore_index=True)
    look: dict[str, Any] = {"x": "at", "y": "loss", "hue": "line", "style": "line", "palette": palette}
    look |= {"dashes": dashes, "errorbar": None}
    grid = sns.relplot(
        frame, **look, kind="line", col="panel", facet_kws={"sharex": False, "sharey": False},
        **facets(len(panels), 2.7),
    )  # fmt: skip
    thin = {"units": "seed", "estimator": None, "legend": False, "linewidth": 0.6, "alpha": 0.6}
    for panel, axis in grid.axes_dict.items():
        shown = frame[frame["panel"] == panel]
        sns.lineplot(shown, **look, **thin, ax=axis)
        _zoom(axis, shown)
    xlabel, ylabel = "time, in steps of AdamW" if ratios else "steps", "validation loss, nats"
    finished(grid, f"{title}; thin lines are single seeds", path, xlabel=xlabel, ylabel=ylabel)


def _zoom(axis: Any, frame: pd.DataFrame) -> None:
    """Show the last two fifths of some curves, from the best seed's end to above the worst mean."""
    ends = frame[frame["at"] == frame.groupby("line")["at"].transform("max")]
    longest, best, worst = frame["at"].max(), ends["loss"].min(), ends.groupby("line")["loss"].mean().max()
    axis.set(xlim=(0.6 * longest, 1.02 * longest), ylim=(best - 0.02, 1.4 * worst - 0.4 * best + 0.05))
