"""Optimizers and normalisers on a small language model of characters.

Rates and dampings are chosen from grids by the validation loss of seed 0, which is then one of those shown.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from examples.gpt import DEFAULT, NORM_LABELS, NORMS, WARM_UP

from ..core.figure import panels
from ..core.runs import DEVICE, interleaved, measure, ratio, run_all, ten_times
from ..core.store import Result, Store, setting
from ..core.study import Piece, Recipe, Sections, Study, Training, protocols
from ..core.tables import Cell, Section, Table, estimate, exact, grouped, machine
from ..core.tables import Row as Cells
from ..core.tune import choose, grid
from ..methods import METHODS
from ..optimizers import REST_LR
from ..problems.language import (
    LANGUAGE,
    VALIDATION_WINDOWS,
    TextRun,
    Trainer,
    batches,
    dampings,
    final_validation_loss,
    lacks,
    title,
    worth,
)  # fmt: skip

#: That shows all of the language model.
PAGE = "docs/results/language-model.md"
#: Steps or times, and losses.
Curve = tuple[list[float], list[float]]


def losses_of(results: Iterable[Result]) -> tuple[list[float], list[float]]:
    """Of validation and test, inf where a run diverged."""
    return [worth(final_validation_loss(r)) for r in results], [worth(r["test_loss"]) for r in results]


def loss_cell(losses: list[float], digits: int) -> Cell:
    """Mean ± standard error, or how many runs diverged."""
    if math.inf in losses:
        return Cell(text := f"diverged, {losses.count(math.inf)} of {len(losses)}", {"": text})
    return estimate(losses, digits)


def at_edge(rate: float | None, tried: Iterable[float]) -> str:
    """A mark, if a setting is the first or the last of several that were tried."""
    values = set(tried)
    return "*" * (len(values) > 1 and rate in (min(values), max(values)))


#: Options that make one small run.
SMOKE = "--preset tiny --steps 2 --seeds 1 --device cpu"


@dataclass
class ModelOptions(Training):
    """Options of every study of the language model."""

    weight_decay: float = 0.0
    """the same for all methods"""
    preset: str = "small"
    """tiny, small, deep, million or gpu"""
    data: str = DEFAULT
    """a file of text; by default one that Python ships"""
    device: str = DEVICE
    """where to train: cpu, cuda, cuda:1, …"""

    def run(self, **more: Any) -> TextRun:
        """A run with these options; what a study compares takes the place of its method, normaliser and rate."""
        common: dict[str, Any] = {"weight_decay": self.weight_decay, "preset": self.preset, "device": self.device}
        return TextRun(self.data, "adamw", "layernorm", 1e-3, **common, **more)


@dataclass
class LanguageOptions(ModelOptions):
    """Options of these studies."""

    methods: tuple[str, ...] | None = None
    """these, with --norms, --lr and --damping"""
    norms: tuple[str, ...] = tuple(NORMS)
    """normalisers"""
    lr: tuple[float, ...] = (3e-3,)
    """peak rates of these methods"""
    damping: tuple[float, ...] = (1.0,)
    """of the methods that have one"""
    steps: tuple[int, ...] = (400,)
    """lengths of the runs"""
    seeds: int = 3
    """how many; seed k is k"""
    time: bool = False
    """train nothing; time the methods' steps in turn"""


class Search(NamedTuple):
    """Rates and dampings that are tried of a method, within each of some normalisers, and more such pairs."""

    method: str
    norms: tuple[str, ...]
    rates: tuple[float, ...]
    dampings: tuple[float, ...] = (1.0,)
    more: tuple[tuple[float, float], ...] = ()


_RATES, _DAMPINGS = (1e-3, 3e-3, 1e-2, 3e-2), (0.3, 1.0, 3.0)
#: Of MAC, whose mean direction has one eigenvalue of d times the mean: a damping of 3 is hardly one.
_MAC_DAMPINGS = (1.0, 10.0, 100.0)
_LN, _LN_AND_NONE, _FOUR_NORMS = ("layernorm",), ("layernorm", "none"), ("layernorm", "rmsnorm", "dyt", "none")
_SEARCHES = [
    Search("adamw", _FOUR_NORMS, _RATES),
    Search("muon", _FOUR_NORMS, _RATES),
    Search("batch-ideal-adamw", _LN, _RATES, _DAMPINGS),
    Search("whitened-adamw", _LN, _RATES, _DAMPINGS, ((3e-3, 0.1), (1e-2, 0.1))),
    Search("whitened-adamw", ("none",), (3e-3,), (0.3, 1.0), ((1e-2, 1.0),)),
    Search("whitened-muon", _LN, _RATES, _DAMPINGS, ((1e-2, 10.0),)),
    Search("whitened-muon", ("none",), (1e-2,), _DAMPINGS),
    Search("whitened-adamw-16", _LN, _RATES[1:3], _DAMPINGS),
    Search("whitened-adamw-16", ("none",), _RATES[:3], (0.3, 1.0)),
    Search("whitened-muon-16", _LN, _RATES[1:], _DAMPINGS, ((1e-2, 10.0),)),
    Search("whitened-muon-16", ("none", "rmsnorm", "dyt"), _RATES[1:3], (1.0, 3.0)),
    Search("mac-adamw", _LN, _RATES[:3], _MAC_DAMPINGS),
    Search("mac-muon", _LN, _RATES[:3], _MAC_DAMPINGS),
    Search("sgd", _LN, (0.03, 0.1, 0.3, 1.0)),
    Search("whitened-sgd", _LN, (0.03, 0.1, 0.3, 1.0), (1.0, 3.0)),
    Search("schedulefree", _LN_AND_NONE, _RATES),
    Search("soap", _LN_AND_NONE, _RATES),
    Search("whitened-soap", _LN_AND_NONE, _RATES[1:3], _DAMPINGS),
]
_LONGER = [Search(method, _LN, _RATES[1:3], (3.0,)) for method in ("muon", "whitened-muon-16")]
_WRAPPERS = [
    *(
        search
        for method in ("adamw", "proportional-adamw")
        for search in (Search(method, _LN_AND_NONE, _RATES[:3]), Search(method, ("dyt",), (3e-4, *_RATES[:3])))
    ),
    Search("adamw", ("affine-like",), _RATES),
    Search("unit-consistent-adamw", ("layernorm", "none", "dyt"), _RATES),
]
#: Method, norm, rate, steps.
Fixed = tuple[str, str, float, int]
#: Rates that came second where a seed goes wrong at the first, by every seed.
_SMALL_TOO, _WRAPPERS_TOO = [("whitened-adamw-16", "none", 3e-3, 400)], [("adamw", "affine-like", 1e-2, 400)]
#: As long as four hundred and two thousand steps of whitening take.
_EQUAL_TIME = [("muon", "layernorm", 1e-2, 432), ("muon", "layernorm", 3e-3, 2160)]
#: Of the rows of a batch, 1,024, as many as `max_rows` lets count, or all.
_ROWS = [
    (f"whitened-{optimizer}{rows}", "layernorm", lr, 400)
    for optimizer, lr in (("adamw", 3e-3), ("muon", 1e-2))
    for rows in ("", "-256-rows", "-64-rows")
]
#: What rate and damping are chosen for.
_CHOICE = setting("method", "norm", "steps")


def rows_of(planned: Iterable[TextRun]) -> list[list[TextRun]]:
    """Runs that differ in rate and damping alone: of every method, norm and number of steps."""
    return list(grouped(planned, lambda run: (run.method, run.norm, run.steps)).values())


def _run(options: LanguageOptions, store: Store, searches: Sequence[Search], fixed: Sequence[Fixed]) -> None:
    """With one seed over all rates and dampings, then with all seeds where its validation loss is lowest.

    Beside what is searched, fixed runs of (method, norm, rate, steps) by every seed.
    """
    if options.seeds < 1:
        raise ValueError(f"seeds is {options.seeds}; a run needs at least one.")
    like = options.run()
    if options.time:
        known = [name for name, method in METHODS.items() if method.applies == "language" and lacks(name) is None]
        about = {"part": "time", "preset": options.preset, "device": options.device}
        key, methods = f"time of {options.preset} on {options.device}", options.methods or known
        measure(store, {key: lambda: about | step_times(methods, like)}, again=True)
        return
    if options.methods:
        searches, fixed = [Search(m, options.norms, options.lr, options.damping) for m in options.methods], []
    planned = [
        replace(like, method=search.method, norm=norm, lr=lr, damping=damping, steps=steps)
        for steps in options.steps
        for search in searches
        if options.methods or lacks(search.method) is None
        for norm in search.norms
        for lr, damping in [*product(search.rates, dampings(search.method, list(search.dampings))), *search.more]
    ]
    rows = rows_of(planned)
    chosen = [run for run, *others in rows if not others]
    if len(chosen) < len(rows):
        chosen = choose(list(map(grid, rows)), LANGUAGE, store, download=options.download)
    for method, norm, lr, steps in fixed:
        (damping,) = dampings(method, [1.0])
        chosen.append(replace(like, method=method, norm=norm, lr=lr, damping=damping, steps=steps))
    every = [replace(run, seed=seed) for run in chosen for seed in range(options.seeds)]
    run_all(every, LANGUAGE, store, download=options.download)


def step_times(methods: Sequence[str], like: TextRun, rounds: int = 21) -> dict[str, Any]:
    """Time ten steps of every method in turn, as often as a whitening measures; ratios to AdamW's, and its own.

    All have the data, size and device of `like`; no rate and no damping costs more than another.
    """
    text = LANGUAGE.load(like, False)

    def job(run: TextRun) -> Callable[[], None]:
        trainer, steps = Trainer(run, text), enumerate(batches(run, text.train), start=1)
        return ten_times(lambda: trainer.step(*next(steps)))

    like = replace(like, steps=10 * (rounds + 2))
    names = dict.fromkeys(["adamw", *methods])
    seconds = interleaved({m: job(replace(like, method=m, damping=dampings(m, [1.0])[0])) for m in names}, rounds)
    ratios = {method: ratio(times, seconds["adamw"]) for method, times in seconds.items()}
    return {"adamw_ms": 1e3 * statistics.median(seconds["adamw"]) / 10, "time_ratio": ratios}


def _report(store: Store, name: str, folder: Path, figures: bool = True) -> Sections:
    """Heading, figures, table and caption of every protocol; without times of steps no figure against time."""
    parts, timed = list[str | Table](), {(t["preset"], t["device"]): t for t in store.read("time")}
    groups = list(protocols(store, name, "norm", "steps", "method", "lr", "damping", "seed"))
    for own, group, tried in groups:
        heading, time = title(group[0]), timed.get(setting("preset", "device")(group[0]))
        if figures:
            _figure(group, heading, {}, folder / f"{own}-steps.png")
        if figures and time:
            _figure(group, heading, time["time_ratio"], folder / f"{own}-time.png")
        table = _table(group, tried, time, own.removeprefix(f"{name}-") if len(groups) > 1 else "")
        parts += [f"**{heading}**", table, _caption(group, tried, time)]
    return {name: Section(parts)}


def _rows(results: Iterable[Result]) -> list[list[Result]]:
    """The seeds of every combination of settings, in the order in which tables show them."""

    def place(result: Result) -> tuple[float, ...]:
        s = result["settings"]
        norm, method = list(NORM_LABELS).index(s["norm"]), list(METHODS).index(s["method"])
        return norm, s["steps"], method, s["lr"], s.get("damping", 0.0)

    found = grouped(sorted(results, key=setting("seed")), place)
    return [found[key] for key in sorted(found)]


def _table(results: list[Result], tried: list[Result], time: Result | None, name: str) -> Table:
    """Losses (mean ± standard error over seeds) and time of every combination of settings."""
    ratios, cells = time["time_ratio"] if time else {}, list[Cells]()
    for seeds in _rows(results):
        settings = seeds[0]["settings"]
        same = [result["settings"] for result in tried if _CHOICE(result) == _CHOICE(seeds[0])]
        row: list[str | Cell] = [METHODS[settings["method"]].label, NORM_LABELS[settings["norm"]]]
        for key in ("lr", "damping"):
            cell = exact(settings.get(key))
            mark = at_edge(settings.get(key), (other[key] for other in same if key in other))
            row.append(cell._replace(text=cell.text + mark))
        validation, test = losses_of(seeds)
        row += [exact(settings["steps"]), loss_cell(test, 4), loss_cell(validation, 4)]
        cells.append([*row, exact(ratios.get(settings["method"], {}).get("median"), ".2f")])
    header = ["method", "normaliser", "learning rate", "damping", "steps"]
    header += ["test loss", "validation loss", "time per step"]
    # Of many rows a page shows those with the first of the normalisers, which all methods have.
    worth = [row[1] == cells[0][1] for row in cells] if len(cells) > 20 else None
    return Table(header, cells, worth, name)


def _caption(results: list[Result], tried: list[Result], time: Result | None) -> str:
    """Say under a table what its numbers are."""
    environment, settings = results[0]["environment"], results[0]["settings"]
    seeds = " or ".join(str(count) for count in sorted({len(row) for row in _rows(results)}))
    chosen = timed = ""
    if tried:
        counts = sorted(set(Counter(_CHOICE(result) for result in tried).values()))
        chosen = (
            f"Learning rate and damping are the best of {' or '.join(map(str, counts))} combinations by the validation "
            "loss of seed 0; * is an edge of what was tried. "
        )
    if time:
        timed = (
            "Time is a whole training step's, as a ratio to AdamW's "
            f"({time['adamw_ms']:.0f} ms): medians of {time['time_ratio']['adamw']['rounds']} interleaved rounds, "
            f"{time['environment']['threads']} thread(s). "
        )
    return (
        f"Cross entropy in nats per character, mean ± standard error over {seeds} seed(s): on "
        f"the last tenth of the text (test) and on at most {VALIDATION_WINDOWS} windows of the tenth before "
        f"it (validation). {chosen}Learning rates rise over {WARM_UP:.0%} of the steps, then fall to 0 by a cosine "
        f"(schedule-free: stay). Muon's embeddings, head, norms and biases are AdamW's, at {REST_LR:g}. "
        f"Weight decay {settings['weight_decay']:g}. {timed}{machine(environment, settings['device'])}"
    )


def _longest(results: list[Result]) -> list[Result]:
    steps = max(result["settings"]["steps"] for result in results)
    return [result for result in results if result["settings"]["steps"] == steps]


def best_rows(results: list[Result]) -> dict[tuple[str, str], list[Result]]:
    """(norm, method) → of the longest runs, the seeds at the lowest mean validation loss."""
    found = grouped(_rows(_longest(results)), lambda seeds: setting("norm", "method")(seeds[0]))
    return {
        key: min(several, key=lambda seeds: statistics.fmean(losses_of(seeds)[0])) for key, several in found.items()
    }


def curve(seeds: list[Result]) -> Curve:
    """Steps and validation loss: means over seeds, as far as all of them have one."""
    measured = zip(*(zip(r["steps"], r["validation_loss"], strict=True) for r in seeds), strict=False)
    points = [list(zip(*at, strict=True)) for at in measured]
    finite = [(at, losses) for at, losses in points if None not in losses]
    return [statistics.fmean(at) for at, _ in finite], [statistics.fmean(losses) for _, losses in finite]


#: Methods in a panel.
_TOGETHER = 4


def _figure(results: list[Result], title: str, ratios: dict[str, Any], path: Path) -> None:
    """Draw the end of validation loss against steps, or time by its ratios: of every normaliser the best first."""
    shown = [r for r in _longest(results) if not ratios or r["settings"]["method"] in ratios]
    found, lines = grouped(_rows(shown), lambda seeds: seeds[0]["settings"]["norm"]), dict[str, list[list[Result]]]()
    for norm, rows in found.items():
        best = sorted(rows, key=lambda seeds: statistics.fmean(losses_of(seeds)[0]))
        for place in range(0, len(best), _TOGETHER):
            together = best[place : place + _TOGETHER]
            which = f": {place + 1}{f' to {place + len(together)}' * (len(together) > 1)}" * (len(best) > _TOGETHER)
            lines[f"{NORM_LABELS[norm]}{which}"] = together
    xlabel, ylabel = "time, in steps of AdamW" if ratios else "steps", "validation loss, nats"
    with panels(list(lines), title, path, height=2.7, sharey=False, xlabel=xlabel, ylabel=ylabel) as axes:
        for axis, rows in zip(axes, lines.values(), strict=True):
            zoom(axis, [draw(axis, seeds, found[seeds[0]["settings"]["norm"]], ratios) for seeds in rows])


def draw(axis: Any, seeds: list[Result], rows: list[list[Result]], ratios: dict[str, Any]) -> list[Curve]:
    """Draw the mean of some seeds, and each of them by a thin line; return the mean first, and then these."""
    name, rate = seeds[0]["settings"]["method"], seeds[0]["settings"]["lr"]
    method, scale = METHODS[name], ratios[name]["median"] if ratios else 1.0
    # Methods with a damping are dashed: colour alone does not carry to everyone.
    label, style = method.label, "--" if method.damped else "-"
    twins = [row[0]["settings"]["lr"] for row in rows if row[0]["settings"]["method"] == name]
    if len(twins) > 1:
        label, style = f"{label}, rate {rate:g}", "-" if rate == min(twins) else ":"
    drawn = [([scale * at for at in steps], losses) for steps, losses in map(curve, [seeds, *([one] for one in seeds)])]
    axis.plot(*drawn[0], style, color=method.color, label=label, linewidth=1.8)
    for one in drawn[1:]:
        axis.plot(*one, style, color=method.color, linewidth=0.6, alpha=0.6)
    axis.plot([], [], color="0.5", linewidth=0.6, label="thin: every seed")
    return drawn


def zoom(axis: Any, drawn: Iterable[Sequence[Curve]]) -> None:
    """Show the last two fifths of some methods' curves, from the best seed's end to above the worst mean."""
    ends = [[(x[-1], y[-1]) for x, y in curves if y] for curves in drawn]
    if any(ends):
        longest = max(x for own in ends for x, _ in own)
        best, worst = min(y for own in ends for _, y in own), max(own[0][1] for own in ends if own)
        axis.set(xlim=(0.6 * longest, 1.02 * longest), ylim=(best - 0.02, 1.4 * worst - 0.4 * best + 0.05))


def _study(
    help: str, recipe: Recipe, searches: Sequence[Search], fixed: Sequence[Fixed] = (), *,
    steps: int = 400, preset: str = "small", figures: bool = True, pieces: Sequence[Piece] = (),
) -> Study:  # fmt: skip
    options = LanguageOptions(steps=(steps,), preset=preset)
    run, draws = partial(_run, searches=searches, fixed=fixed), partial(_report, figures=figures)
    smoke = f"--methods adamw --norms none {SMOKE}"
    return Study(help, run, draws, options, makes=[recipe], data="text", page=PAGE, smoke=smoke, pieces=pieces)


_TIMES = ("", "--time")
_PIECE = Piece(
    1, "char-lm",
    "--methods muon whitened-muon-16 adamw whitened-adamw-16 --norms layernorm --seeds 1 --preset gpu --steps 1000",
    "--methods adamw whitened-adamw-16 --norms layernorm --seeds 1 --preset tiny --steps 4",
)  # fmt: skip
_EQUAL_TIMES = ("", "--time --methods adamw muon whitened-muon-16 whitened-adamw-16")


STUDIES = {
    "char-lm": _study(
        "optimizers and normalisers on a small language model", Recipe(4.0, options=_TIMES, decides="--seeds 10"),
        _SEARCHES, _SMALL_TOO, pieces=[_PIECE],
    ),
    "char-lm-2000": _study(
        "Muon, plain and whitened, for 2,000 steps", Recipe(1.0, options=_TIMES, decides="--seeds 10"),
        _LONGER, steps=2000,
    ),
    "char-lm-equal-time": _study(
        "Muon for as long as whitening takes", Recipe(0.3, options=_EQUAL_TIMES), [], _EQUAL_TIME, figures=False
    ),
    "char-lm-rows": _study(
        "whitening by some of the rows", Recipe(0.5, options=("--seeds 5",)), [], _ROWS, figures=False
    ),
    "char-lm-wrappers": _study(
        "wrappers against norms", Recipe(1.6), _WRAPPERS, _WRAPPERS_TOO, preset="million"
    ),
}  # fmt: skip
