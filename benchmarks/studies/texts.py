"""What the studies of the language model share: options of a command, how losses stand in tables, and their curves."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns

from examples.gpt import DEFAULT, NORM_LABELS

from ..core.figure import panels, seaborn
from ..core.runs import DEVICE
from ..core.store import Result, setting
from ..core.study import Training
from ..core.tables import Cell, estimate, grouped, machine
from ..methods import METHODS
from ..problems.language import TextRun, final_validation_loss, worth

#: The seeds of a line, or of a row.
Seeds = list[Result]
#: The page that shows their tables.
PAGE = "docs/results/language-model.md"
#: Options that make one small run.
SMOKE = "--preset tiny --steps 2 --seeds 1 --device cpu"


@dataclass
class TextOptions(Training):
    """Options of every study of the language model."""

    weight_decay: float = 0.0  # the same for all methods
    preset: str = "small"  # size of the network: tiny, small, deep, million or gpu
    data: str = DEFAULT  # a file of text, or python-reference, which Python ships
    device: str = DEVICE  # where to train: cpu, cuda, cuda:1, …

    def run(self, **more: Any) -> TextRun:
        """A run with these options; what a study compares takes the place of its method, normaliser and rate."""
        common: dict[str, Any] = {"weight_decay": self.weight_decay, "preset": self.preset, "device": self.device}
        return TextRun(self.data, "adamw", "layernorm", 1e-3, **common, **more)


def losses_of(results: Iterable[Result]) -> tuple[list[float], list[float]]:
    """The losses of validation and test, inf where a run diverged."""
    each = [(worth(final_validation_loss(result)), worth(result["test_loss"])) for result in results]
    return [validation for validation, _ in each], [test for _, test in each]


def loss_cell(losses: list[float], digits: int) -> Cell:
    """Mean ± standard error, or how many runs diverged."""
    if math.inf in losses:
        return Cell(text := f"diverged, {losses.count(math.inf)} of {len(losses)}", {"": text})
    return estimate(losses, digits)


def about(results: list[Result]) -> str:
    """What the numbers of a table are, for a caption."""
    return (
        "Cross entropy in nats per character, mean ± standard error over seeds; settings of trials are the best by the "
        "validation loss of seed 0, in char-lm-again of seed 101. "
        f"{machine(results[0]['environment'], results[0]['settings']['device'])}"
    )


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


def draw(lines: Mapping[str, Sequence[Seeds]], title: str, path: Path, ratios: Mapping[str, Any] | None = None) -> None:
    """Draw the end of validation loss against steps, or against time: means, and each seed by a thin line.

    Args:
        lines: panel → the seeds of each of its lines.
        title: of the figure.
        path: of the picture.
        ratios: method → the time of its step, in steps of AdamW.
    """
    alike = setting("norm", "method", "steps")
    rates = grouped([seeds[0] for rows in lines.values() for seeds in rows], alike)
    look: dict[str, Any] = {"x": "at", "y": "loss", "hue": "line", "style": "line", "errorbar": None}
    xlabel, ylabel = "time, in steps of AdamW" if ratios else "steps", "validation loss, nats"
    with panels(list(lines), title, path, height=2.7, sharey=False, xlabel=xlabel, ylabel=ylabel) as axes:
        for axis, rows in zip(axes, lines.values(), strict=True):
            points, palette, dashes = list[pd.DataFrame](), dict[str, str](), dict[str, Any]()
            for seeds in rows:
                name, rate = setting("method", "lr")(seeds[0])
                # Methods with a damping are dashed: colour alone does not carry to everyone.
                label, dash = METHODS[name].label, (4, 1.5) if METHODS[name].damped else ""
                if len(others := [setting("lr")(each) for each in rates[alike(seeds[0])]]) > 1:
                    label, dash = f"{label}, rate {rate:g}", "" if rate == min(others) else (1, 1)
                palette[label], dashes[label] = METHODS[name].color, dash
                scale, own = ratios[name]["median"] if ratios else 1.0, curve(seeds)
                points.append(own.assign(line=label, at=scale * own["steps"]))
            frame = pd.concat(points, ignore_index=True)
            look |= {"palette": palette, "dashes": dashes}
            seaborn(sns.lineplot, axis, frame, **look, linewidth=1.8)
            seaborn(
                sns.lineplot, axis, frame, **look, units="seed", estimator=None, linewidth=0.6, alpha=0.6, legend=False
            )
            axis.plot([], [], color="0.5", linewidth=0.6, label="thin: every seed")
            _zoom(axis, frame)


def _zoom(axis: Any, frame: pd.DataFrame) -> None:
    """Show the last two fifths of some curves, from the best seed's end to above the worst mean."""
    ends = frame[frame["at"] == frame.groupby("line")["at"].transform("max")]
    longest, best, worst = frame["at"].max(), ends["loss"].min(), ends.groupby("line")["loss"].mean().max()
    axis.set(xlim=(0.6 * longest, 1.02 * longest), ylim=(best - 0.02, 1.4 * worst - 0.4 * best + 0.05))
