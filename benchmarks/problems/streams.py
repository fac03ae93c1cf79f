"""One row a step, predicted before it is learned: gradient-only rules against structural remedies and bounded steps.

A row is a window of 16 values, a target, and the scale that errors are divided by. An arm's learning rate is the best
of ten on two seeds that no table shows, or of more until it lies between two others.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.cbook import get_sample_data
from numpy.lib.stride_tricks import sliding_window_view
from scipy.signal import lfilter
from scipy.stats import wilcoxon
from torch import Tensor, nn

from ..core.arms import variants
from ..core.figure import panels
from ..core.runs import Kind, Watch, check_known, interleaved, measure, run_all
from ..core.store import Result, Store, setting
from ..core.study import Compared, Recipe, Sections, Study, check_length
from ..core.tables import Cell, Section, Table, exact, grouped, in_order, machine, pivot, ranged
from ..core.tune import choose, ladder
from ..optimizers import OF_MODELS
from ..train import MEASUREMENTS, FieldRun, perceptron

#: Values in a window, and units of both hidden layers.
TAPS, WIDTH = 16, 64
#: Steps of Euler's method in a unit of time, and units of time between two values of the Mackey-Glass series.
FINE, SPACING = 10, 3
#: κ of ObGD, as its authors have it.
KAPPA = 2.0
#: Of the running mean square that the remedy divides by, for each row.
DECAY = 0.95


class Stream(NamedTuple):
    """A signal, row by row."""

    windows: Any  # (rows, 16)
    targets: Any  # (rows,)
    scales: Any  # (rows,), of the targets


def resonance(generator: np.random.Generator, count: int) -> np.ndarray:
    """An autoregression of order 2 with variance 1."""
    innovations = generator.normal(size=count + 500)
    return lfilter([1.0], [1.0, -1.6, 0.8], innovations)[500:] / np.sqrt(1.8 / (0.2 * (1.8**2 - 1.6**2)))


def coloured(generator: np.random.Generator, rows: int, follows: bool) -> Stream:
    """A coloured signal; its target has the same amplitude, which wanders over two orders of magnitude, or none."""
    count = rows + TAPS - 1
    signal = resonance(generator, count)
    scale = np.exp(lfilter([0.15], [1.0, -0.995], generator.normal(size=count + 2000))[2000:])
    mixing, readout = generator.normal(size=(TAPS, 8)) / TAPS**0.5, generator.normal(size=8) / 8**0.5
    scales = scale[TAPS - 1 :] if follows else np.ones(rows)
    targets = scales * (np.tanh(sliding_window_view(signal, TAPS) @ mixing) @ readout)
    return Stream(sliding_window_view(scale * signal, TAPS), targets, scales)


def echo(generator: np.random.Generator, rows: int) -> Stream:
    """The echo of speech-like bursts behind a loudspeaker that saturates; half of the time is a pause."""
    level = np.concatenate([
        10 ** generator.uniform(-1, 0.5) * generator.integers(2) * np.hanning(length)
        for length in generator.integers(50, 300, size=rows // 50 + 2)
    ])[: rows + TAPS - 1]  # fmt: skip
    speech = level * resonance(generator, rows + TAPS - 1) + 1e-3 * generator.normal(size=rows + TAPS - 1)
    path = generator.normal(size=TAPS) * np.exp(-np.arange(TAPS)[::-1] / 4)
    targets = sliding_window_view(np.tanh(speech), TAPS) @ path + 1e-3 * generator.normal(size=rows)
    return Stream(sliding_window_view(speech, TAPS), targets, np.ones(rows))


def mackey_glass(generator: np.random.Generator, rows: int) -> Stream:
    """The next value of a chaotic series whose scale drifts over two orders of magnitude and back in 500 rows."""
    delay, count = 17 * FINE, rows + TAPS
    values = list(generator.uniform(0.5, 1.3, size=delay + 1))
    for _ in range(FINE * SPACING * (count + 100)):
        now, before = values[-1], values[-delay - 1]
        values.append(now + (0.2 * before / (1 + before**10) - 0.1 * now) / FINE)
    series = np.array(values)[:: FINE * SPACING][-count:]
    scale = 10 ** np.sin(2 * np.pi * (np.arange(count) / 500 + generator.uniform()))
    series = scale * (series - series.mean()) / series.std()
    return Stream(sliding_window_view(series, TAPS)[:-1], series[TAPS:], scale[TAPS:])


def membrane(generator: np.random.Generator, rows: int, ahead: int = 5) -> Stream:
    """Matplotlib's recording of a cell's membrane potential, five samples ahead; a seed draws where it begins."""
    path: Any = get_sample_data("membrane.dat", asfileobj=False)
    series = np.fromfile(path, np.float32).astype(float)
    count = rows + TAPS - 1 + ahead
    start = generator.integers(1000, 10500 - count)  # it is at rest before and after
    series = series[start : start + count]
    series = (series - series[:200].mean()) / series[:200].std()
    return Stream(sliding_window_view(series, TAPS)[:-ahead], series[TAPS - 1 + ahead :], np.ones(rows))


SIGNALS: dict[str, Callable[[np.random.Generator, int], Stream]] = {
    "coloured": lambda generator, rows: coloured(generator, rows, follows=True),
    "coloured-plain": lambda generator, rows: coloured(generator, rows, follows=False),
    "echo": echo, "mackey-glass": mackey_glass, "membrane": membrane,
}  # fmt: skip


@dataclass(frozen=True)
class StreamRun(FieldRun):
    """One network and one signal, drawn by one seed; it has as many steps as rows."""

    signal: str = "coloured"
    bound: str | None = None  # of steps: "norm" of the gradient or "overshooting"
    limit: float | None = None  # of that norm
    running_rms: bool | None = None  # windows and targets are divided by it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(("limit",), signal=SIGNALS, bound=(None, "norm", "overshooting"))


def by_running_rms(signal: Stream) -> Stream:
    """Divide all by the running root mean square of the windows, the current one included: known before the target."""
    squares = np.square(signal.windows).mean(1)
    rms = np.sqrt(lfilter([1 - DECAY], [1.0, -DECAY], squares, zi=[DECAY * squares[0]])[0]) + 1e-6
    return Stream(signal.windows / rms[:, None], signal.targets / rms, signal.scales / rms)


def signal_of(run: StreamRun) -> Stream:
    """Return the rows of a run, as tensors."""
    signal = SIGNALS[run.signal](np.random.default_rng(run.seed), run.steps or 0)
    signal = by_running_rms(signal) if run.running_rms else signal
    return Stream(*(torch.tensor(part, dtype=torch.get_default_dtype()) for part in signal))


def share(rate: float, gradients: Sequence[Tensor], error: Tensor) -> Tensor:
    r"""Return the share of its step that ObGD takes (Elsayed, Vasan and Mahmood 2024, arXiv 2410.14606) without traces.

    It is :math:`1 / \max(1, \alpha \kappa \max(|\delta|, 1) |z|_1)`, with z the gradient of the output.

    Args:
        rate: α.
        gradients: of half the squared error, so δz.
        error: δ.
    """
    size = torch.stack([g.abs().sum() for g in gradients]).sum() / error.abs()
    overshoot = rate * KAPPA * error.abs().clamp(min=1) * size
    return 1 / overshoot.nan_to_num(nan=0.0).clamp(min=1)  # without an error there is no gradient


class Loop:
    """A tanh network and the optimizer that learns row by row."""

    def __init__(self, run: StreamRun) -> None:
        torch.manual_seed(run.seed)
        self.run, self.model = run, nn.Sequential(*perceptron((TAPS, WIDTH, WIDTH, 1), run.norm, nn.Tanh))
        optimizer = OF_MODELS[run.optimizer].make(self.model, run.lr)
        self.optimizer = run.make_method().wrap(optimizer, self.model, torch.empty(0))

    def step(self, window: Tensor, target: Tensor) -> Tensor:
        """Learn from a row, (16,) and (), and return the error of before."""
        self.optimizer.zero_grad()
        error = self.model(window[None]).squeeze() - target
        error.square().div(2).backward()
        if self.run.bound == "norm":
            nn.utils.clip_grad_norm_(self.model.parameters(), self.run.limit or math.inf)
        elif self.run.bound == "overshooting":
            gradients: list[Any] = [parameter.grad for parameter in self.model.parameters()]
            torch._foreach_mul_(gradients, share(self.run.lr or 0.0, gradients, error.detach()))
        self.optimizer.step()
        return error.detach()


def relative_error(errors: Tensor, signal: Stream) -> float | None:
    """Return Σ(e/s)² / Σ(y/s)² over the second half of a stream; None unless it is finite."""
    half = slice(len(signal.targets) // 2, None)
    squares = [(part[half] / signal.scales[half]).double().square().sum() for part in (errors, signal.targets)]
    value = (squares[0] / squares[1]).item()
    return value if math.isfinite(value) else None


def train(run: StreamRun, watch: Watch) -> dict[str, Any]:
    """Train one run, until its rows or its finite errors end."""
    signal, loop = signal_of(run), Loop(run)
    start, errors = time.process_time(), torch.full_like(signal.targets, math.nan)
    for row, (window, target) in enumerate(zip(signal.windows, signal.targets, strict=True)):
        errors[row] = loop.step(window, target)
        watch.tick()
        if row % (len(errors) // MEASUREMENTS or 1) == 0:
            watch.note(row, {"error": [errors[row].item()]})
        if not errors[row].isfinite():
            break
    return {"error": relative_error(errors, signal), "seconds": round(time.process_time() - start, 6)}


#: How runs are made.
STREAMS = Kind(
    steps=lambda run, data: run.steps,
    train=lambda runs, data, watch: [train(run, watch) for run in runs],
    score=lambda result: result["error"],
)
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
        f"s is the target's amplitude where that is known, else 1. Median over {seeds} seeds; the file has quartiles. "
        "Learning rates are the best of ten on two other seeds, and of as many for each of three limits of "
        "clipping or three dampings. "
        f"Time is processor time of a plain loop, the median of 41 rounds in turn. {where}"
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
