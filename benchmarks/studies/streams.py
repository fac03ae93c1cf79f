"""Streams learned row by row: arms, their searches, table and figure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import wilcoxon

from ..core.arms import variants
from ..core.figure import panels
from ..core.runs import check_known, interleaved, measure, run_all
from ..core.store import Result, Store, setting
from ..core.study import Compared, Recipe, Sections, Study, check_length
from ..core.tables import Cell, Section, Table, exact, grouped, in_order, machine, pivot, ranged
from ..core.tune import choose, ladder
from ..problems.streams import SIGNALS, STREAMS, Loop, StreamRun, signal_of

#: Learning rates, of which searches begin with ten.
RATES = [2.0**power for power in range(-24, 9)]
#: Stands for an error that is not finite, where only its rank counts.
DIVERGED = 1e30
#: Seeds that choose; tables show others.
TUNED_ON = [{"seed": 101}, {"seed": 102}]


class Arm(NamedTuple):
    """Settings that are compared."""

    label: str
    color: str
    first: int  # power of two of the lowest rate that a search begins with
    settings: Mapping[str, Any]
    searched: Sequence[Mapping[str, Any]] = ({},)  # settings, each of which has a search of its own


_LIMITS, _DAMPINGS = ([{name: value} for value in (0.1, 1.0, 10.0)] for name in ("limit", "damping"))
ARMS = {
    "sgd": Arm("SGD", "tab:red", -10, {}),
    "clipped": Arm("SGD, gradient clipped", "tab:orange", -8, {"bound": "norm"}, _LIMITS),
    "adam": Arm("Adam", "tab:blue", -15, {"optimizer": "adam"}),
    "obgd": Arm("ObGD's bound", "tab:brown", -9, {"bound": "overshooting"}),
    "layernorm": Arm("SGD, LayerNorm", "tab:green", -10, {"norm": "layernorm"}),
    "running-rms": Arm("SGD, running RMS", "black", -9, {"running_rms": True}),
    "proportional": Arm("Proportional SGD", "tab:cyan", -6, {"method": "proportional"}),
    "disproportional": Arm("Disproportional SGD", "dimgray", -6, {"method": "disproportional"}),
    "whitened": Arm("Whitened SGD", "indigo", -9, {"method": "whitened"}, _DAMPINGS),
}
TITLES = {
    "coloured": "wandering amplitude, target follows", "coloured-plain": "wandering amplitude, target does not follow",
    "echo": "echo of speech-like bursts", "mackey-glass": "Mackey-Glass, drifting scale",
    "membrane": "membrane potential",
}  # fmt: skip


def run_of(arm: str, **settings: Any) -> StreamRun:
    """Return an arm's run with some settings."""
    return StreamRun("", **{"method": "none", "optimizer": "sgd", "lr": 0.01, **ARMS[arm].settings, **settings})


def _place(result: Result) -> tuple[str, str]:
    """The arm and the signal of a run."""
    names = ("optimizer", "method", "norm", "bound", "running_rms")
    wanted = [result["settings"].get(name) for name in names]
    arm = next(arm for arm in ARMS if [run_of(arm).settings().get(name) for name in names] == wanted)
    return arm, result["settings"]["signal"]


def _median(values: Mapping[int, float]) -> Cell:
    quartiles = np.quantile([min(value, DIVERGED) for value in values.values()], (0.25, 0.5, 0.75))
    low, middle, high = (value if value < 1e-3 * DIVERGED else math.inf for value in quartiles)
    cell = ranged(low, middle, high, n=len(values), diverged=sum(map(math.isinf, values.values())))
    return cell._replace(text="diverges") if math.isinf(middle) else cell


def against(values: Mapping[int, float], rival: Mapping[int, float]) -> Cell:
    """The median ratio of two arms' errors, and p of Wilcoxon's signed ranks, for which divergence is a large error."""
    logs = [math.log(min(values[seed], DIVERGED) / min(rival[seed], DIVERGED)) for seed in values if seed in rival]
    if not any(logs):
        return Cell("", {})
    ratio, p = math.exp(statistics.median(logs)), float(wilcoxon(logs).pvalue)
    return Cell(f"× {ratio:.3g} ({p:.2g})", {"ratio": ratio, "p": p, "n": len(logs)})


def tolerated(rates: Mapping[float, float]) -> tuple[float, float]:
    """The lowest and highest rate around the best with errors within 10 % of the lowest, linear between logarithms."""
    order = sorted(rates)
    best = min(order, key=rates.__getitem__)
    limit, ends = math.log(1.1 * rates[best]), []
    for side in (order[: order.index(best)][::-1], order[order.index(best) + 1 :]):
        end = best
        for rate in side:
            if rates[rate] > 1.1 * rates[best]:
                inside, outside = math.log(rates[end]), math.log(rates[rate])
                part = 0.0 if math.isinf(outside) else (limit - inside) / (outside - inside)
                end *= (rate / end) ** part
                break
            end = rate
        ends.append(end)
    return ends[0], ends[1]


class Outcome(NamedTuple):
    """What an arm reached on a signal by the settings chosen last, and which learning rates would have done."""

    errors: Mapping[int, float]  # seed → relative error; infinite where a run diverged
    lr: float
    bound: float | None  # the limit of clipping, or a damping
    trials: int
    low: float
    high: float


def _outcome(results: Sequence[Result], searched: Sequence[Result]) -> Outcome:
    """The range of rates is of the geometric means of the trials' errors, at the limit or damping that is chosen."""
    lr, bound = _chosen(results[-1])
    errors = {setting("seed")(r): math.inf if r["error"] is None else r["error"] for r in results
              if _chosen(r) == (lr, bound)}  # fmt: skip
    tried = grouped(searched, _chosen)
    scores = {rate: [r["score"] for r in each] for (rate, at), each in tried.items() if at == bound}
    means = {rate: math.inf if None in each else statistics.geometric_mean(each) for rate, each in scores.items()}
    return Outcome(errors, lr, bound, len(tried), *tolerated(means))


def _chosen(result: Result) -> tuple[float, float | None]:
    """Learning rate, and limit or damping, of a run."""
    settings = result["settings"]
    return settings["lr"], settings.get("limit", settings.get("damping"))


def _figure(outcomes: Mapping[tuple[str, str], Outcome], signals: list[str], path: Path) -> None:
    names = in_order(ARMS, (name for name, _ in outcomes))[::-1]
    with panels([TITLES[s] for s in signals], "Range of learning rates within 10 % of the best", path,
                columns=2, height=2.6, xlabel="learning rate / best learning rate", xscale="log") as axes:  # fmt: skip
        for axis, signal in zip(axes, signals, strict=True):
            for place, name in enumerate(names):
                if outcome := outcomes.get((name, signal)):
                    low, high = outcome.low / outcome.lr, outcome.high / outcome.lr
                    axis.plot([low, high], [place] * 2, color=ARMS[name].color, linewidth=5)
                    axis.plot([1], [place], "|", color="white", markersize=7)
                    width = f"× {high / low:.{0 if high > 10 * low else 1}f}"
                    axis.annotate(width, (high, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
            axis.set_yticks(range(len(names)), [ARMS[name].label for name in names])
            axis.margins(x=0.2)


def report(store: Store, name: str, folder: Path) -> Sections:
    """A table of all arms and signals, one for each signal, and a figure of the rates that do."""
    results = store.read()
    groups, searched = (grouped(each, _place) for each in (results, store.read("search")))
    outcomes = {place: _outcome(runs, searched[place]) for place, runs in groups.items()}
    signals = in_order(SIGNALS, (signal for _, signal in outcomes))
    _figure(outcomes, signals, folder / f"{name}.png")
    where, rows = machine(results[0]["environment"]), results[0]["settings"]["steps"]
    seeds = len({r["settings"]["seed"] for r in results})
    cells: dict[tuple[str, str], str | Cell] = {
        key: (cell := _median(outcome.errors))._replace(text=cell.text.partition(" ")[0])
        for key, outcome in outcomes.items()
    }
    cells |= {(r["settings"]["arm"], "time"): exact(r["milliseconds"], ".2g") for r in store.read("time")}
    caption = (
        f"Relative error, Σ(e/s)² / Σ(y/s)², of the second half of {rows:,} rows, each predicted before it is learned; "
        f"s is the target's amplitude where known, else 1. Median over {seeds} seeds. Rates: best of ten on two other "
        f"seeds, for each of three limits or dampings. Processor time of a plain loop, 41 rounds. {where}"
    )
    labels = {key: arm.label for key, arm in ARMS.items()}
    parts = {name: Section([pivot(["arm"], labels, TITLES | {"time": "ms per step"}, cells), caption])}
    about = "Ratios are medians over seeds, p is of Wilcoxon's signed ranks; rates within 10 % of the best."
    for signal in signals:
        of_arms = {key: each for (key, other), each in outcomes.items() if other == signal}
        rivals = {title: of_arms.get(key) for key, title in (("sgd", "SGD"), ("running-rms", "the running RMS"))}
        table = Table.of([{
            "arm": ARMS[key].label,
            "learning rate": exact(own.lr),
            "limit or damping": exact(own.bound),
            "trials": exact(own.trials),
            "relative error": _median(own.errors),
            **{f"against {title} (p)": "" if rival in (own, None) else against(own.errors, rival.errors)
               for title, rival in rivals.items()},
            "range of rates": exact(own.high / own.low, ".2g"),
        } for key, own in ((key, of_arms[key]) for key in in_order(ARMS, of_arms))])  # fmt: skip
        parts[f"{name}-{signal}"] = Section([f"**{TITLES[signal]}**", table, f"{about} {where}"])
    return parts


@dataclass
class StreamOptions(Compared):
    """Options of this study; a run has as many rows as steps."""

    arms: tuple[str, ...] = tuple(ARMS)  # that are compared
    signals: tuple[str, ...] = tuple(SIGNALS)  # that they learn


def time_per_step(arms: Sequence[str]) -> dict[str, float]:
    """Milliseconds of a step of the plain loop, the median of 41 rounds of 16 rows in turn."""
    windows, targets, _ = signal_of(run_of("sgd", steps=16))

    def learn(loop: Loop) -> None:
        for window, target in zip(windows, targets, strict=True):
            loop.step(window, target)

    seconds = interleaved({arm: partial(learn, Loop(run_of(arm, **ARMS[arm].searched[0]))) for arm in arms}, 41)
    return {arm: 1000 * statistics.median(each) / len(windows) for arm, each in seconds.items()}


def _run(options: StreamOptions, store: Store) -> None:
    check_known("arm", options.arms, ARMS)
    check_known("signal", options.signals, SIGNALS)
    check_length(store, steps=options.steps)
    for key in options.arms:
        start = RATES.index(2.0 ** ARMS[key].first)
        for signal in options.signals:
            each = [run_of(key, signal=signal, steps=options.steps, **more) for more in ARMS[key].searched]
            search = ladder(each, RATES, RATES[start : start + options.trials])
            (best,) = choose([search], STREAMS, store, math.log, each=partial(variants, changes=TUNED_ON))
            run_all(variants(best, [{"seed": seed} for seed in range(1, options.seeds + 1)]), STREAMS, store)
    missing = [key for key in options.arms if not store.has(f"time {key}")]
    for key, milliseconds in time_per_step(missing).items():
        entry = {"part": "time", "settings": {"arm": key}, "milliseconds": milliseconds}
        measure(store, {f"time {key}": partial(dict, entry)})


STUDIES = {
    "streams": Study(
        "one row a step: gradient-only rules, structural remedies and bounded steps", _run, report,
        StreamOptions(steps=1500),
        makes=[Recipe(0.25)], smoke="--trials 1 --seeds 2 --steps 8 --signals echo --arms sgd proportional",
        page="docs/results/streams.md",
    )
}  # fmt: skip
