"""Optimizers and normalisers on a small language model of characters.

Rates and dampings are chosen from grids by the validation loss of seed 0, which is then one of those shown. Other
studies of the language model have options, losses in tables and captions from here.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import seaborn as sns

from examples.gpt import DEFAULT, NORM_LABELS, NORMS

from ..core.figure import panels, seaborn
from ..core.runs import DEVICE, in_turn, measure, run_all, ten_times
from ..core.store import Result, Store, setting
from ..core.study import Recipe, Sections, Study, Training, protocols, refuse_given
from ..core.tables import Cell, Row, Section, Table, estimate, exact, grouped, machine
from ..core.tune import choose, grid
from ..methods import METHODS
from ..problems import language
from ..problems.language import LANGUAGE, TextRun, dampings, final_validation_loss, title, worth

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


class Search(NamedTuple):
    """The rates and dampings that are tried of some methods with some normalisers, and more such pairs."""

    methods: Sequence[str]
    norms: Sequence[str] = ("layernorm",)
    rates: Sequence[float] = (1e-3, 3e-3, 1e-2, 3e-2)
    dampings: Sequence[float] = (0.3, 1.0, 3.0)
    more: Sequence[tuple[float, float]] = ()

    def runs(self, like: TextRun) -> Iterator[TextRun]:
        """All that is tried."""
        for method, norm in product(self.methods, self.norms):
            for lr, damping in [*product(self.rates, dampings(method, self.dampings)), *self.more]:
                yield replace(like, method=method, norm=norm, lr=lr, damping=damping)


#: Steps, and what runs so long by every seed without a search.
Fixed = Sequence[tuple[int, Search]]
_SGD_RATES = (0.03, 0.1, 0.3, 1.0)
_WHITENED = [
    Search(["whitened-adamw"], more=[(3e-3, 0.1), (1e-2, 0.1)]),
    Search(["whitened-muon"], more=[(1e-2, 10.0)]),
]
_SEARCHES = [
    Search(["adamw", "muon"], ["layernorm", "rmsnorm", "dyt", "none"]),
    Search(["batch-ideal-adamw"]),
    *_WHITENED,
    Search(["whitened-adamw"], ["none"], [3e-3], [0.3, 1.0], [(1e-2, 1.0)]),
    Search(["whitened-muon"], ["none"], [1e-2]),
    Search(["whitened-adamw-16"], rates=[3e-3, 1e-2]),
    Search(["whitened-adamw-16"], ["none"], [1e-3, 3e-3, 1e-2], [0.3, 1.0]),
    Search(["whitened-muon-16"], rates=[3e-3, 1e-2, 3e-2], more=[(1e-2, 10.0)]),
    Search(["whitened-muon-16"], ["none", "rmsnorm", "dyt"], [3e-3, 1e-2], [1.0, 3.0]),
    Search(["mac-adamw", "mac-muon"], rates=[1e-3, 3e-3, 1e-2], dampings=[1.0, 10.0, 100.0]),
    Search(["sgd"], rates=_SGD_RATES),
    Search(["whitened-sgd"], rates=_SGD_RATES, dampings=[1.0, 3.0]),
    Search(["schedulefree", "soap"], ["layernorm", "none"]),
    Search(["whitened-soap"], ["layernorm", "none"], [3e-3, 1e-2]),
]
_WRAPPERS = [
    Search(["adamw", "proportional-adamw"], ["layernorm", "none"], [1e-3, 3e-3, 1e-2]),
    Search(["adamw", "proportional-adamw"], ["dyt"], [3e-4, 1e-3, 3e-3, 1e-2]),
    Search(["adamw"], ["affine-like"]),
    Search(["unit-consistent-adamw"], ["layernorm", "none", "dyt"]),
]


@dataclass
class LanguageOptions(TextOptions):
    """Options of these studies."""

    methods: tuple[str, ...] = ()  # these, with --norms, --lr and --damping, in place of what the study tries
    norms: tuple[str, ...] = tuple(NORMS)  # normalisers of these methods
    lr: tuple[float, ...] = (3e-3,)  # peak rates of these
    damping: tuple[float, ...] = (1.0,)  # of those that have one
    steps: tuple[int, ...] = (400,)  # lengths of the runs
    seeds: int = 3  # how many; seed k is k
    tuned_on: int = 0  # the seed of trials
    time: bool = False  # train nothing; time the methods' steps in turn


def _run(options: LanguageOptions, store: Store, searches: Sequence[Search], fixed: Fixed) -> None:
    """Search with one seed, then run all seeds where the validation loss of that is lowest, and what is fixed."""
    like, methods = replace(options.run(), seed=options.tuned_on), options.methods
    if not methods:
        refuse_given(options, ("norms", "lr", "damping"), "on what the study tries; name --methods as well")
    if options.time:
        methods = methods or tuple(name for name, method in METHODS.items() if method.applies == "language")
        about = {"part": "time", "preset": options.preset, "device": options.device}
        key = f"time of {options.preset} on {options.device}"
        measure(store, {key: lambda: about | step_times(methods, like)}, again=True)
        return
    if methods:
        searches, fixed = [Search(methods, options.norms, options.lr, options.damping)], []
    lengths = [replace(like, steps=steps) for steps in options.steps]
    tried = [run for length in lengths for search in searches for run in search.runs(length)]
    rows = grouped(tried, lambda run: (run.method, run.norm, run.steps)).values()
    chosen = tried
    if any(len(row) > 1 for row in rows):
        chosen = choose([grid(row) for row in rows], LANGUAGE, store, download=options.download)
    for steps, search in fixed:
        chosen += search.runs(replace(like, steps=steps))
    every = [replace(run, seed=seed) for run in chosen for seed in range(options.seeds)]
    run_all(every, LANGUAGE, store, download=options.download)


def step_times(methods: Sequence[str], like: TextRun, rounds: int = 21) -> dict[str, Any]:
    """Time ten steps of every method in turn, as often as a whitening measures; ratios to AdamW's, and its own.

    All have the data, size and device of `like`; no rate and no damping costs more than another.
    """
    text = LANGUAGE.load(like, False)

    def job(run: TextRun) -> Callable[[], None]:
        trainer, steps = language.Trainer(run, text), enumerate(language.batches(run, text.train), start=1)
        return ten_times(lambda: trainer.step(*next(steps)))

    like = replace(like, steps=10 * (rounds + 2))
    names = dict.fromkeys(["adamw", *methods])
    jobs = {name: job(replace(like, method=name, damping=dampings(name, [1.0])[0])) for name in names}
    ratios, milliseconds = in_turn(jobs, rounds)
    return {"adamw_ms": milliseconds / 10, "time_ratio": ratios}


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
    where = machine(results[0]["environment"], results[0]["settings"]["device"])
    return f"Cross entropy in nats per character, mean ± standard error over seeds. {where}"


def rows_of(results: Iterable[Result]) -> list[Seeds]:
    """The seeds of every combination of settings, in the order in which tables show them."""

    def place(result: Result) -> tuple[float, ...]:
        s = result["settings"]
        norm, method = list(NORM_LABELS).index(s["norm"]), list(METHODS).index(s["method"])
        return norm, s["steps"], method, s["lr"], s.get("damping", 0.0)

    return list(grouped(sorted(results, key=lambda each: (*place(each), each["settings"]["seed"])), place).values())


#: Methods in a panel.
_TOGETHER = 4


def best_first(results: list[Result]) -> dict[str, list[Seeds]]:
    """Panel → the seeds of each of its lines: of the longest runs and of every normaliser, the best first."""
    steps, panels = max(map(setting("steps"), results)), {}
    rows = rows_of(result for result in results if result["settings"]["steps"] == steps)
    rows.sort(key=lambda seeds: statistics.fmean(losses_of(seeds)[0]))
    by_norm = grouped(rows, lambda seeds: seeds[0]["settings"]["norm"])
    for norm, best in sorted(by_norm.items(), key=lambda each: list(NORM_LABELS).index(each[0])):
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

    `lines` is panel → the seeds of each of its lines, `ratios` method → the time of its step, in steps of AdamW.
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
            thin = {"units": "seed", "estimator": None, "linewidth": 0.6, "alpha": 0.6, "legend": False}
            seaborn(sns.lineplot, axis, frame, **look, **thin)
            axis.plot([], [], color="0.5", linewidth=0.6, label="thin: every seed")
            # The last two fifths of the curves, from the best seed's end to above the worst mean.
            ends = frame[frame["at"] == frame.groupby("line")["at"].transform("max")]
            longest, best, worst = frame["at"].max(), ends["loss"].min(), ends.groupby("line")["loss"].mean().max()
            axis.set(xlim=(0.6 * longest, 1.02 * longest), ylim=(best - 0.02, 1.4 * worst - 0.4 * best + 0.05))


def report(store: Store, name: str, folder: Path, figures: bool = True) -> Sections:
    """Heading, figures, table and caption of every protocol; without times of steps no figure against time."""
    parts, timed = list[str | Table](), {(t["preset"], t["device"]): t for t in store.read("time")}
    groups = list(protocols(store, name, "norm", "steps", "method", "lr", "damping", "seed"))
    for own, results, _ in groups:
        time = timed.get(setting("preset", "device")(results[0]))
        heading, ratios, caption = title(results[0]), time["time_ratio"] if time else {}, about(results)
        if figures:
            draw(best_first(results), heading, folder / f"{own}-steps.png")
        if figures and time:
            shown = [result for result in results if result["settings"]["method"] in ratios]
            draw(best_first(shown), heading, folder / f"{own}-time.png", ratios)
        if time:
            caption += f" Time per step is in AdamW's {time['adamw_ms']:.0f} ms."
        table = _table(results, ratios, own.removeprefix(f"{name}-") if len(groups) > 1 else "")
        parts += [f"**{heading}**", table, caption]
    return {name: Section(parts)}


def _table(results: list[Result], ratios: Mapping[str, Any], name: str) -> Table:
    """Losses (mean ± standard error over seeds) and time of every combination of settings."""
    rows = list[Row]()
    for seeds in rows_of(results):
        settings, (validation, test) = seeds[0]["settings"], losses_of(seeds)
        rows.append([
            METHODS[settings["method"]].label, NORM_LABELS[settings["norm"]], exact(settings["lr"]),
            exact(settings.get("damping")), exact(settings["steps"]), loss_cell(test, 4), loss_cell(validation, 4),
            exact(ratios.get(settings["method"], {}).get("median"), ".2f"),
        ])  # fmt: skip
    header = ["method", "normaliser", "learning rate", "damping", "steps"]
    return Table([*header, "test loss", "validation loss", "time per step"], rows, name=name)


def _study(
    help: str, recipe: Recipe, searches: Sequence[Search], fixed: Fixed = (), *,
    figures: bool = True, **defaults: Any,
) -> Study:  # fmt: skip
    run, draws = partial(_run, searches=searches, fixed=fixed), partial(report, figures=figures)
    smoke = f"--methods adamw --norms none {SMOKE}"
    options = LanguageOptions(**defaults)
    return Study(help, run, draws, options, makes=[recipe], data="text", page=PAGE, smoke=smoke)


_TIMES = ("", "--time")
STUDIES = {
    # Rates that came second, where a seed goes wrong at the first, by every seed.
    "char-lm": _study(
        "optimizers and normalisers on a small language model", Recipe(4.0, options=_TIMES),
        _SEARCHES, [(400, Search(["whitened-adamw-16"], ["none"], [3e-3], [1.0]))],
    ),
    "char-lm-2000": _study(
        "Muon, plain and whitened, for 2,000 steps", Recipe(1.0, options=_TIMES),
        [Search(["muon", "whitened-muon-16"], rates=[3e-3, 1e-2], dampings=[3.0])], steps=(2000,),
    ),
    # As long as four hundred and two thousand steps of whitening take.
    "char-lm-equal-time": _study(
        "Muon for as long as whitening takes",
        Recipe(0.3, options=("", "--time --methods adamw muon whitened-muon-16 whitened-adamw-16")),
        [], [(432, Search(["muon"], rates=[1e-2])), (2160, Search(["muon"], rates=[3e-3]))], figures=False,
    ),
    "char-lm-again": _study(
        "a second search, which says how far two of one method lie apart", Recipe(1.0),
        [Search(["adamw", "muon"]), *_WHITENED], figures=False, tuned_on=101, seeds=5,
    ),
    "char-lm-wrappers": _study("wrappers against norms", Recipe(1.6), _WRAPPERS,
        [(400, Search(["adamw"], ["affine-like"], [1e-2]))], preset="million",
    ),
}  # fmt: skip
