"""Arms that learned the same problems: paired comparisons of them, their tables and figures."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import ttest_1samp

from ..train import label
from .figure import panels, shade
from .store import Result, Store
from .study import Sections, protocols
from .tables import Cell, Row, Section, Table, exact, grouped, machine

#: Settings that make an arm.
ARM = ("norm", "optimizer", "method", "every", "rows")
#: Settings in which the runs of one protocol may differ.
WITHIN = (*ARM, "lr", "damping", "seed", "crop", "data_set")
_HUES = {"adam": "tab:blue", "muon": "tab:orange", "soap": "tab:green", "sgd": "tab:red", "lbfgs": "tab:purple"}


class Look(NamedTuple):
    """How errors are shown."""

    shown: Callable[[float], float]  # error → the number of tables and figures
    cell: Callable[[Sequence[float]], Cell]  # the shown numbers of an arm → its cell
    unit: str  # of tables and figures
    difference: Callable[[float], str]  # a mean difference of shown numbers → its cell
    logarithmic: bool = False  # the scale of figures
    about: str = ""  # the end of the caption


def arm(result: Result) -> tuple[Any, ...]:
    """What is compared: normaliser, optimizer, wrapper, its steps between measurements, and which rows it counts."""
    return tuple(result["settings"].get(name) for name in ARM)


def problem(result: Result) -> tuple[Any, ...]:
    """What one run of each arm has in common: crop, data set, seed."""
    return tuple(result["settings"].get(name) for name in ("data_set", "crop", "seed"))


def errors(results: Iterable[Result]) -> dict[tuple[Any, ...], float]:
    """Problem → final error; infinite where a run broke down."""
    return {problem(r): math.inf if r["error"][-1] is None else r["error"][-1] for r in results}


def chosen(results: Iterable[Result]) -> list[Result]:
    """The runs with the settings that each arm's trials chose last."""
    found = grouped(results, arm).values()
    return [r for own in found for r in own if _settings(r) == _settings(own[-1])]


def _settings(result: Result) -> tuple[Any, ...]:
    return tuple(result["settings"].get(name) for name in ("lr", "damping"))


class Comparison(NamedTuple):
    """Two arms on the problems that both have learned."""

    difference: float  # mean of own minus the other's
    p: float  # of the paired t test
    n: int


def compared(
    own: Mapping[tuple[Any, ...], float], other: Mapping[tuple[Any, ...], float], shown: Callable[[float], float],
    margin: float = 0.0,
) -> Comparison:  # fmt: skip
    """Own minus other, problem by problem, against a margin; a pair in which either is infinite makes it NaN."""
    both = [key for key in own if key in other]
    pairs = [[shown(each[key]) if math.isfinite(each[key]) else math.nan for each in (own, other)] for key in both]
    differences = [ours - theirs for ours, theirs in pairs]
    p = float(ttest_1samp(differences, margin).pvalue) if len(both) > 1 else math.nan
    return Comparison(statistics.fmean(differences) if both else math.nan, p, len(both))


def _against(found: Comparison, look: Look) -> str | Cell:
    if not math.isfinite(found.difference):
        return ""
    text = f"{look.difference(found.difference)} ({found.p:.2g})"
    return Cell(text, {"difference": found.difference, "p": found.p, "n": found.n})


def _table(results: Sequence[Result], look: Look, trials: Mapping[Any, int], worth: Callable[[Any], bool]) -> Table:
    arms = grouped(results, arm)
    normalised = any(key[0] == "batchnorm" for key in arms)
    reference = {
        computer: statistics.median(map(pace, own)) for computer, own in grouped(_adam(results), _computer).items()
    }
    rows = list[tuple[float, bool, Row]]()
    for key, own in arms.items():
        norm, optimizer, method, *_ = key
        settings, found = own[0]["settings"], errors(own)
        bare, batch = (arms.get((each, optimizer, "none", None, None)) for each in (norm, "batchnorm"))
        cells: list[str | Cell] = [label(settings), exact(settings["lr"])]
        cells += [exact(settings.get("damping")), exact(trials.get(key))]
        cells.append(look.cell(list(map(look.shown, found.values()))))
        cells.append(_against(compared(found, errors(bare), look.shown), look) if bare and method != "none" else "")
        if normalised:
            other = norm != "batchnorm" and batch
            cells.append(_against(compared(found, errors(batch or []), look.shown), look) if other else "")
        beside = [pace(r) / reference[_computer(r)] for r in own if _computer(r) in reference]
        cells.append(exact(statistics.median(beside) if beside else None, ".2f"))
        rows.append((statistics.fmean(map(look.shown, found.values())), worth(key), cells))
    header = ["arm", "learning rate", "damping", "trials", look.unit, "against the bare optimizer (p)"]
    header += ["against BatchNorm with the same (p)"] * normalised + ["time per step"]
    rows.sort(key=lambda row: row[0] * (1 if look.logarithmic else -1))
    return Table(header, [cells for *_, cells in rows], [shown for _, shown, _ in rows])


def _adam(results: Iterable[Result]) -> list[Result]:
    return [r for r in results if arm(r)[:3] == ("none", "adam", "none")]


def _computer(result: Result) -> str:
    return str(result["environment"]["processor"])


def pace(result: Result) -> float:
    """Seconds of processor time that a step of a run took."""
    return result["seconds"][-1] / max(1, result["steps"][-1])


def compared_by(results: Iterable[Result]) -> dict[str, str]:
    """Return what runs are drawn against, and the panels' titles: steps, and time if one computer ran them all."""
    by_steps, by_time = {"steps": "by steps"}, {"seconds": "by processor time"}
    return by_steps | (by_time if len(set(map(_computer, results))) == 1 else {})


def _figure(results: Sequence[Result], look: Look, title: str, path: Path, shown: Callable[[Any], bool]) -> None:
    """Draw the arms' errors against what all of them can be compared by."""
    drawn = [r for r in results if shown(arm(r))]
    names = compared_by(drawn)
    with panels(list(names.values()), title, path, ylabel=look.unit) as axes:
        for key, own in grouped(drawn, arm).items():
            norm, optimizer, method, _, counted = key
            look_of = {
                "color": _HUES.get(optimizer, "black"),
                "linestyle": "-" if method == "whitened" else "--" if method == "none" else ":",
                "marker": "." if counted else "",
                "linewidth": 2.2 if norm == "batchnorm" else 1.4,
                "alpha": 0.55 if norm == "batchnorm" else 1.0,
                "label": label(own[0]["settings"]),
            }
            whole = [r for r in own if None not in r["error"]]
            count = min((len(r["error"]) for r in whole), default=0)
            shown_as = (lambda error: error) if look.logarithmic else look.shown
            curves = [[shown_as(r["error"][k]) for r in whole] for k in range(count)]
            for axis, name in zip(axes, names, strict=True):
                x = [statistics.median(r[name][k] for r in whole) for k in range(count)]
                axis.plot(x, [statistics.median(values) for values in curves], **look_of)
            if look.logarithmic and count:
                quartiles = [statistics.quantiles(values, n=4) for values in curves if len(values) > 1]
                if len(quartiles) == count:
                    low, high = ([each[k] for each in quartiles] for k in (0, 2))
                    shade(axes[-1], x, low, high, look_of["color"], "band: quartiles")
        for axis, xlabel in zip(axes, ("steps", "seconds of one core"), strict=False):
            axis.set_xlabel(xlabel)
        if look.logarithmic:
            axes[0].set_yscale("log")


def sections(
    store: Store, name: str, folder: Path, look: Look, named: Callable[[Mapping[str, Any]], tuple[str, str]],
    drawn: Callable[[Any], bool],
) -> Sections:  # fmt: skip
    """A section for every protocol: heading, figure, table, caption.

    Args:
        store: the results.
        name: of their file.
        folder: for figures.
        look: how errors are shown.
        named: settings → what is put behind the name of the section, and its heading.
        drawn: whether an arm is in the figure, and its row on a page.
    """
    found: Sections = {}
    searched = grouped(store.read("search"), lambda r: named(r["settings"])[0])
    for _, every, _ in protocols(store, name, *WITHIN):
        results = chosen(every)
        settings = results[0]["settings"]
        suffix, heading = named(settings)
        points = {(arm(r), r["settings"]["lr"], r["settings"].get("damping")) for r in searched.get(suffix, [])}
        trials = {key: len(each) for key, each in grouped(points, lambda point: point[0]).items()}
        _figure(results, look, heading, folder / f"{name}-{suffix}.png", drawn)
        machines = " ".join(dict.fromkeys(machine(r["environment"]) for r in results))
        loosely = "Time per step is processor time, in Adam's steps, often of another day."
        caption = f"{look.about} {loosely} {machines}"
        found[f"{name}-{suffix}"] = Section([f"**{heading}**", _table(results, look, trials, drawn), caption])
    return found
