"""Arms that learn the same problems: how their settings are chosen, and comparisons in pairs, in tables and figures.

An arm is a normaliser, an optimizer and a wrapper. `train.py` makes its runs.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..methods import METHODS
from ..optimizers import OF_MODELS
from .figure import panels, shade
from .runs import Kind, R, Run, run_all
from .store import Result, Store, setting
from .study import Sections, protocols
from .tables import Cell, Section, Table, exact, grouped, machine, paired, ranged
from .tune import around, choose


class Arm(NamedTuple):
    """The settings that are compared."""

    norm: str
    optimizer: str
    method: str
    hidden: int | None = None  # width of the network, where arms have networks of their own
    rows: str | None = None  # which rows the wrapper counts beside the inputs

    @property
    def bare(self) -> "Arm":
        """The arm without its wrapper."""
        return self._replace(method="none", rows=None)


#: Settings of a run by name, in place of those that it has.
Changes = Mapping[str, Any]
#: Learning rates that searches begin with; an optimizer that has none is not among them.
STARTS = {"adam": 1e-2, "muon": 3.2e-2, "soap": 3.2e-2, "sgd": 0.32, "momentum": 1e-2, "lbfgs": 1.0}
STARTS |= {"adam-lbfgs": 1e-2, "spring": 0.1, "random-features": 4.0}  # of random features it is their slope
#: In place of infinity, which has no quantiles but nan; and what no finite number reaches that is averaged with it.
_INFINITE, _LOWEST = 1e300, 300
#: Settings in which the runs of one protocol may differ.
WITHIN = (*Arm._fields, "lr", "damping", "seed", "crop", "data_set", "inner", "draws")
_NORMS = {"none": "", "batchnorm": "BatchNorm, ", "layernorm": "LayerNorm, ", "columns": "whitened columns, "}


def first_trial(like: Any, arm: Arm, damping: float = 0.1, starts: Mapping[str, float] = STARTS) -> Any:
    """A run with an arm's settings, and with the learning rate and damping that their search begins with."""
    settings = {name: value for name, value in arm._asdict().items() if value is not None}
    run = replace(like, **settings, lr=starts.get(arm.optimizer))
    return replace(run, damping=damping) if run.damped else run


def variants(run: R, changes: Iterable[Changes]) -> list[R]:
    """The run with some settings replaced, once for each change."""
    return [replace(run, **change) for change in changes]


def compete(
    first: R, trials: int, kind: Kind, store: Store, loss: Callable[[float], float],
    shown: Iterable[Changes], tuned_on: Sequence[Changes] = ({},),
) -> R:  # fmt: skip
    """Search around an arm's first trial, make the runs that tables show, and return the best trial; see `choose`.

    `loss` is of a final error, and averaged over the runs of a trial, which differ in the settings `tuned_on`. Those
    that tables show differ from the best trial in the settings `shown`.
    """
    (best,) = choose([around(first, trials)], kind, store, loss, each=partial(variants, changes=tuned_on))
    run_all(variants(best, shown), kind, store)
    return best


def label(settings: Mapping[str, Any] | Run) -> str:
    """What tables and figures call an arm, such as "BatchNorm, whitened Muon"."""
    s = settings.settings() if isinstance(settings, Run) else settings
    norm, optimizer = _NORMS[s["norm"]], OF_MODELS[s["optimizer"]].label
    width = [f"width {s['hidden']}"] if s.get("hidden") else []
    if s["method"] == "none":
        return ", ".join([f"{norm}{optimizer}", *width])
    name, *details = METHODS[s["method"]].label.removeprefix("gradient-only ").split(", ")
    rows = [f"rows of {s['rows']}"] if s.get("rows") else []
    return ", ".join([f"{norm}{name} {optimizer}", *details, *rows, *width])


#: What one run of each arm has in common, and what trials choose.
_problem, _tuned = setting("data_set", "crop", "seed"), setting("lr", "damping", "inner")


def arm(result: Result) -> Arm:
    """The arm of a run."""
    return Arm(*setting(*Arm._fields)(result))


def errors(results: Iterable[Result]) -> dict[tuple[Any, ...], float]:
    """Problem → final error; infinite where a run broke down."""
    return {_problem(r): math.inf if r["error"][-1] is None else r["error"][-1] for r in results}


def chosen(results: Iterable[Result]) -> list[Result]:
    """The runs with the settings that each arm's trials chose last; of two ways to draw points by the better one."""
    kept = list[Result]()
    for runs in grouped(results, arm).values():
        by_way = grouped(runs, setting("draws")).values()
        ways = [[r for r in own if _tuned(r) == _tuned(own[-1])] for own in by_way]
        kept += min(ways, key=lambda own: statistics.median(errors(own).values()))
    return kept


def pace(result: Result) -> float:
    """Seconds of processor time that a step of a run took."""
    return result["seconds"][-1] / max(1, result["steps"][-1])


def quartiles(values: Sequence[float]) -> Cell:
    """The cell of an arm whose errors are shown by their powers of ten: median and quartiles."""
    finite = [min(value, _INFINITE) for value in values]
    powers = statistics.quantiles(finite, n=4) if len(values) > 1 else finite * 3
    low, middle, high = (10**power if power < _LOWEST else math.inf for power in powers)
    return ranged(low, middle, high, n=len(values))


class Look(NamedTuple):
    """How errors are shown."""

    shown: Callable[[float], float]  # error → the number of tables and figures
    cell: Callable[[Sequence[float]], Cell]  # the shown numbers of an arm → its cell
    unit: str  # of tables and figures
    difference: Callable[[float], str]  # a mean difference of shown numbers → its cell
    logarithmic: bool = False  # the scale of figures
    about: str = ""  # the end of the caption

    def level(self, results: Iterable[Result]) -> float:
        """The mean of the shown numbers."""
        return statistics.fmean(map(self.shown, errors(results).values()))

    def estimate(self, results: Iterable[Result]) -> str | Cell:
        """The cell of an arm; of one without runs it is empty."""
        final = errors(results)
        return self.cell(list(map(self.shown, final.values()))) if final else ""

    def gain(self, results: Iterable[Result], others: Iterable[Result]) -> str | Cell:
        """The cell of an arm against another; without a problem that both have learned it is empty."""
        mean, p, *_, n = paired(errors(results), errors(others), self.shown)
        if not math.isfinite(mean):
            return ""
        return Cell(f"{self.difference(mean)} ({p:.2g})", {"difference": mean, "p": p, "n": n})


def _table(results: Sequence[Result], look: Look, trials: Mapping[Arm, int], drawn: Callable[[Arm], bool]) -> Table:
    arms = grouped(results, arm)
    bare = [r for key, runs in arms.items() if key._replace(hidden=None) == Arm("none", "adam", "none") for r in runs]
    reference = {each: statistics.median(map(pace, runs)) for each, runs in grouped(bare, _network).items()}
    order = sorted(arms, key=lambda key: look.level(arms[key]), reverse=not look.logarithmic)
    rows = list[dict[str, str | Cell]]()
    for key in order:
        runs, settings = arms[key], arms[key][0]["settings"]
        normalised = arms.get(Arm("batchnorm", key.optimizer, "none"), [])
        paces = [pace(r) / reference[_network(r)] for r in runs if _network(r) in reference]
        rows.append({
            "arm": label(settings),
            "learning rate": exact(settings.get("lr")),
            "damping": exact(settings.get("damping")),
            "points": exact(settings.get("inner")),
            "trials": exact(trials.get(key)),
            look.unit: look.estimate(runs),
            "against the bare optimizer (p)": look.gain(runs, arms.get(key.bare, [])) if key.method != "none" else "",
            "against BatchNorm with the same (p)": look.gain(runs, normalised) if key.norm != "batchnorm" else "",
            "time per step": exact(statistics.median(paces) if paces else None, ".2f"),
        })  # fmt: skip
    return Table.of(rows, worth=[drawn(key) for key in order])


def _network(result: Result) -> tuple[Any, ...]:
    return result["environment"]["processor"], result["settings"].get("hidden")


def style(arm: Arm) -> dict[str, Any]:
    """How an arm's curve is drawn: a colour for the optimizer, lines for the wrapper, wide and pale for BatchNorm.

    That of a network of less than 50 units is thin.
    """
    is_wide, is_bare = arm.norm == "batchnorm", arm.method == "none" and arm.norm != "layernorm"
    return {
        "color": OF_MODELS[arm.optimizer].color,
        "linestyle": "-" if arm.method == "whitened" else "--" if is_bare else ":",
        "marker": "." if arm.rows else "",
        "linewidth": 2.2 if is_wide else 1.4 if (arm.hidden or 50) >= 50 else 0.8,
        "alpha": 0.55 if is_wide else 1.0,
    }


def _curves(runs: Sequence[Result], look: Look) -> np.ndarray:
    """The shown numbers of runs, one below the other: one that ended keeps its last, infinity if it broke."""
    curves = [[look.shown(math.inf if error is None else error) for error in r["error"]] for r in runs]
    length = max(map(len, curves))
    return np.array([own + own[-1:] * (length - len(own)) for own in curves])


def _figure(results: Sequence[Result], look: Look, title: str, path: Path) -> None:
    """Draw the arms' errors by steps, and by time if one computer ran all: means, or medians and quartiles."""
    has_times = len({r["environment"]["processor"] for r in results}) == 1
    names = ["steps", "seconds"][: 1 + has_times]
    with panels(["by steps", "by processor time"][: len(names)], title, path, ylabel=look.unit) as axes:
        for key, runs in grouped(results, arm).items():
            curves = _curves(runs, look)
            whole = [r for r in runs if len(r["error"]) == curves.shape[1]]
            middle = np.mean(curves, axis=0)
            if look.logarithmic:
                quartiles = np.quantile(np.minimum(curves, _INFINITE), (0.25, 0.5, 0.75), axis=0, method="weibull")
                highest = curves[np.isfinite(curves)].max()
                low, _, high = 10.0 ** np.minimum(quartiles, highest)
                middle = 10.0 ** np.where(quartiles[1] > highest, math.nan, quartiles[1])
            for axis, name in zip(axes, names, strict=True):
                x = np.median([r[name] for r in whole], axis=0)
                axis.plot(x, middle, label=label(runs[0]["settings"]), **style(key))
            if look.logarithmic and len(runs) > 1:
                shade(axes[-1], x, low, high, style(key)["color"], "band: quartiles")
        for axis, xlabel in zip(axes, ("steps", "seconds of one core"), strict=False):
            axis.set_xlabel(xlabel)
        if look.logarithmic:
            axes[0].set_yscale("log")


def sections(
    store: Store, name: str, folder: Path, look: Look, named: Callable[[Mapping[str, Any]], tuple[str, str]],
    drawn: Callable[[Arm], bool],
) -> Sections:  # fmt: skip
    """A section for every protocol of a file with this name: heading, figure, table, caption.

    `named` is settings → what is put behind the name of the section, and its heading; `drawn` is whether an arm is in
    the figure, and its row on a page.
    """
    parts: Sections = {}
    searched = grouped(store.read("search"), lambda r: named(r["settings"])[0])
    for _, every, _ in protocols(store, name, *WITHIN):
        results = chosen(every)
        suffix, heading = named(results[0]["settings"])
        trials = Counter(key for key, _ in {(arm(r), _tuned(r)) for r in searched.get(suffix, [])})
        _figure([r for r in results if drawn(arm(r))], look, heading, folder / f"{name}-{suffix}.png")
        machines = " ".join(dict.fromkeys(machine(r["environment"]) for r in results))
        caption = f"{look.about} Time per step is processor time, in Adam's steps, often of another day. {machines}"
        table = _table(results, look, trials, drawn)
        parts[f"{name}-{suffix}"] = Section([f"**{heading}**", table, caption])
    return parts
