"""Optimizers and normalisers on a small language model of characters, and the same without normalisers.

Two ways to choose. `char-lm` and its kin try grids of rates and dampings with seed 0, which is then one of those shown.
`norm-free` and its kin choose a rate for a normaliser, a way to draw the embeddings and an optimizer: from rates that
are the same for all and, while the best is the lowest or the highest tried, the next one; losses are of other seeds.
Both choose by the validation loss.
"""

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from examples.gpt import NORM_LABELS, NORMS, WARM_UP

from ..core.figure import band, panels
from ..core.runs import measure, run_all
from ..core.store import Result, Store, setting
from ..core.study import UNTRIED, Piece, Recipe, Sections, Study, named, protocol
from ..core.table import Cell, Section, Table, against, estimate, exact, grouped, machine, mean_and_error
from ..core.table import Row as Cells
from ..core.tune import choose, grid, ladder
from ..language.run import REST_LR, SMOKE, TextRun, add_arguments, dampings, described, lacks
from ..language.train import LANGUAGE, VALIDATION_WINDOWS, final_validation_loss, step_times, title, worth
from ..methods import METHODS, Search, having, searched

_PAGE = "docs/results/language-model.md"
#: Steps or times, and losses.
Curve = tuple[list[float], list[float]]


def _losses(results: Iterable[Result]) -> tuple[list[float], list[float]]:
    """Of validation and test, inf where a run diverged."""
    return [worth(final_validation_loss(r)) for r in results], [worth(r["test_loss"]) for r in results]


def _loss(losses: list[float], digits: int) -> Cell:
    if math.inf in losses:
        return Cell(text := f"diverged, {losses.count(math.inf)} of {len(losses)}", {"": text})
    return estimate(losses, digits)


def _at_edge(rate: float | None, tried: Iterable[float]) -> str:
    """A mark, if a setting is the first or the last of several that were tried."""
    values = set(tried)
    return "*" * (len(values) > 1 and rate in (min(values), max(values)))


# Grids.
#: Method, norm, rate, steps.
Fixed = tuple[str, str, float, int]
#: Methods, and what their rates and dampings are chosen from.
Searches = Sequence[tuple[str, Search]]
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
_GRIDDED = protocol("norm", "steps", "method", "lr", "damping", "seed")


def rows_of(planned: Iterable[TextRun]) -> list[list[TextRun]]:
    """Runs that differ in rate and damping alone: of every method, norm and number of steps."""
    return list(grouped(planned, lambda run: (run.method, run.norm, run.steps)).values())


def _run_grids(options: argparse.Namespace, store: Store, searches: Searches, fixed: Sequence[Fixed]) -> None:
    """With one seed over all rates and dampings, then with all seeds where its validation loss is lowest.

    Beside what is searched, fixed runs of (method, norm, rate, steps) by every seed.
    """
    if options.seeds < 1:
        raise ValueError(f"seeds is {options.seeds}; a run needs at least one.")
    like = described(options)
    if options.time:
        known = [name for name, method in METHODS.items() if method.applies == "language" and lacks(name) is None]
        about = {"part": "time", "preset": options.preset, "device": options.device}
        key, methods = f"time of {options.preset} on {options.device}", options.methods or known
        measure(store, {key: lambda: about | step_times(methods, like)}, again=True)
        return
    if options.methods:
        own = Search("", tuple(options.norms), tuple(options.lr), tuple(options.damping))
        searches, fixed = [(method, own) for method in options.methods], []
    planned = [
        replace(like, method=method, norm=norm, lr=lr, damping=damping, steps=steps)
        for steps in options.steps
        for method, search in searches
        if options.methods or lacks(method) is None
        for norm in search.within
        for lr, damping in [*product(search.rates, dampings(method, list(search.dampings))), *search.more]
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


def _report_grids(store: Store, name: str, folder: Path, figures: bool = True) -> Sections:
    """Heading, figures, table and caption of every protocol; without times of steps no figure against time."""
    parts, timed = list[str | Table](), {(t["preset"], t["device"]): t for t in store.read("time")}
    groups = named(name, store.read(), _GRIDDED)
    for own, group in groups.items():
        tried = [result for result in store.read("search") if _GRIDDED(result) == _GRIDDED(group[0])]
        heading, time = title(group[0]), timed.get(setting("preset", "device")(group[0]))
        if figures:
            _figure(group, heading, {}, folder / f"{own}-steps.png")
        if figures and time:
            _figure(group, heading, time["time_ratio"], folder / f"{own}-time.png")
        table = _table_of_grids(group, tried, time, own.removeprefix(f"{name}-") if len(groups) > 1 else "")
        parts += [f"**{heading}**", table, _caption_of_grids(group, tried, time)]
    return {name: Section(parts)}


def _rows(results: Iterable[Result]) -> list[list[Result]]:
    """The seeds of every combination of settings, in the order in which tables show them."""

    def place(result: Result) -> tuple[float, ...]:
        s = result["settings"]
        norm, method = list(NORM_LABELS).index(s["norm"]), list(METHODS).index(s["method"])
        return norm, s["steps"], method, s["lr"], s.get("damping", 0.0)

    found = grouped(sorted(results, key=setting("seed")), place)
    return [found[key] for key in sorted(found)]


def _table_of_grids(results: list[Result], tried: list[Result], time: Result | None, name: str) -> Table:
    """Losses (mean ± standard error over seeds) and time of every combination of settings."""
    ratios, cells = time["time_ratio"] if time else {}, list[Cells]()
    for seeds in _rows(results):
        settings = seeds[0]["settings"]
        same = [result["settings"] for result in tried if _CHOICE(result) == _CHOICE(seeds[0])]
        row: list[str | Cell] = [METHODS[settings["method"]].label, NORM_LABELS[settings["norm"]]]
        for key in ("lr", "damping"):
            cell = exact(settings.get(key))
            mark = _at_edge(settings.get(key), (other[key] for other in same if key in other))
            row.append(cell._replace(text=cell.text + mark))
        validation, test = _losses(seeds)
        row += [exact(settings["steps"]), _loss(test, 4), _loss(validation, 4)]
        cells.append([*row, exact(ratios.get(settings["method"], {}).get("median"), ".2f")])
    header = ["method", "normaliser", "learning rate", "damping", "steps"]
    header += ["test loss", "validation loss", "time per step"]
    # Of many rows a page shows those with the first of the normalisers, which all methods have.
    worth = [row[1] == cells[0][1] for row in cells] if len(cells) > 20 else None
    return Table(header, cells, worth, name)


def _caption_of_grids(results: list[Result], tried: list[Result], time: Result | None) -> str:
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
    return {key: min(several, key=lambda seeds: statistics.fmean(_losses(seeds)[0])) for key, several in found.items()}


def curve(seeds: list[Result]) -> Curve:
    """Steps and validation loss: means over seeds, as far as all of them have one."""
    measured = zip(*(zip(r["steps"], r["validation_loss"], strict=True) for r in seeds), strict=False)
    points = [list(zip(*at, strict=True)) for at in measured]
    finite = [(at, losses) for at, losses in points if None not in losses]
    return [statistics.fmean(at) for at, _ in finite], [statistics.fmean(losses) for _, losses in finite]


def _figure(results: list[Result], title: str, ratios: dict[str, Any], path: Path) -> None:
    """Draw validation loss against steps, or time of training by its ratios, one panel per normaliser."""
    shown = [r for r in _longest(results) if not ratios or r["settings"]["method"] in ratios]
    lines = grouped(_rows(shown), lambda seeds: seeds[0]["settings"]["norm"])
    names, norms = [NORM_LABELS[norm] for norm in lines], len(lines)
    names += [f"{name}, the end" for name in names]
    with panels(names, title, path, columns=norms, height=2.9, sharey=False, ylabel="validation loss, nats") as axes:
        for whole, end, rows in zip(axes[:norms], axes[norms:], lines.values(), strict=True):
            drawn = [draw((whole, end), seeds, rows, ratios) for seeds in rows]
            # A model that has learned nothing starts about here; a line above it is on its way out.
            whole.set_ylim(top=max(seeds[0]["validation_loss"][0] or 0.0 for seeds in rows))
            zoom(end, drawn)
            end.set_xlabel("time, in steps of AdamW" if ratios else "steps")


def draw(axes: Sequence[Any], seeds: list[Result], rows: list[list[Result]], ratios: dict[str, Any]) -> Curve:
    """Draw the mean of some seeds with a band of one standard error; return it."""
    name, rate = seeds[0]["settings"]["method"], seeds[0]["settings"]["lr"]
    method, (x, y) = METHODS[name], curve(seeds)
    x = [steps * (ratios[name]["median"] if ratios else 1.0) for steps in x]
    # Methods of this library are dashed: colour alone does not carry to everyone.
    label, style = method.label, "--" if method.damped else "-"
    twins = [row[0]["settings"]["lr"] for row in rows if row[0]["settings"]["method"] == name]
    if len(twins) > 1:
        label, style = f"{label}, rate {rate:g}", "-" if rate == min(twins) else ":"
    at = [[r["validation_loss"][place] for r in seeds] for place in range(len(y))]
    for axis in axes:
        band(axis, x, at, style, color=method.color, label=label, linewidth=1.6)
    return x, y


def zoom(axis: Any, curves: Sequence[Curve]) -> None:
    """Show the last two fifths of some curves, from the best of their ends to a quarter of a nat above it."""
    ends = [(x[-1], y[-1]) for x, y in curves if y]
    if ends:
        longest, best = max(x for x, _ in ends), min(y for _, y in ends)
        axis.set(xlim=(0.6 * longest, 1.02 * longest), ylim=(best - 0.02, best + 0.25))


def _gridded(
    help: str, recipe: Recipe, searches: Searches, fixed: Sequence[Fixed] = (), *,
    steps: int = 400, preset: str = "small", figures: bool = True, pieces: Sequence[Piece] = (),
) -> Study:  # fmt: skip
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--methods", nargs="+", metavar="NAME", help="these, with --norms, --lr and --damping")
        parser.add_argument("--norms", nargs="+", default=list(NORMS), metavar="NAME", help=", ".join(NORMS))
        parser.add_argument("--lr", nargs="+", type=float, default=[3e-3], metavar="RATE", help="peak rates of these")
        parser.add_argument("--damping", nargs="+", type=float, default=[1.0], help="of the methods that have one")
        parser.add_argument("--steps", nargs="+", type=int, default=[steps], help="lengths of the runs")
        parser.add_argument("--seeds", type=int, default=3, help="how many; seed k is k")
        parser.add_argument("--time", action="store_true", help="train nothing; time the methods' steps in turn")
        add_arguments(parser, preset)

    run, draws = partial(_run_grids, searches=searches, fixed=fixed), partial(_report_grids, figures=figures)
    smoke = f"--methods adamw --norms none {SMOKE}"
    return Study(help, run, draws, arguments, makes=[recipe], data="text", page=_PAGE, smoke=smoke, pieces=pieces)


_TIMES = ("", "--time")
_PIECE = Piece(
    1, "char-lm",
    "--methods muon whitened-muon-16 adamw whitened-adamw-16 --norms layernorm --seeds 1 --preset gpu --steps 1000",
    "--methods adamw whitened-adamw-16 --norms layernorm --seeds 1 --preset tiny --steps 4",
)  # fmt: skip
_EQUAL_TIMES = ("", "--time --methods adamw muon whitened-muon-16 whitened-adamw-16")


# Without normalisers.
class Row(NamedTuple):
    """What a rate is chosen for."""

    norm: str
    drawn: float | None  # deviation of the embeddings
    method: str
    embedding_lr: float | None = None  # None is that of the other weights


#: Deviation of the embeddings: GPT-2's, or one.
DRAWN: tuple[float | None, ...] = (None, 1.0)
#: Rates, ascending, and those that a search begins with.
Rates = tuple[tuple[float, ...], tuple[float, ...]]
COARSE: Rates = ((3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1), (3e-3, 1e-2, 3e-2))
FINE: Rates = ((5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 2e-2, 3e-2), (2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 2e-2))
_CLIMBED = protocol("norm", "embedding_deviation", "embedding_lr", "method", "lr", "damping", "seed")
#: The normalised network that every row is held against, behind the same kind of optimizer.
TWIN = "layernorm"
#: Normalisers that have a table of their own: the long runs have the single one before the head.
_ELSEWHERE = ("affine-like", "head-layernorm")


def _group(norms: Iterable[str], drawn: Iterable[float | None], methods: Iterable[str]) -> list[Row]:
    return [Row(*row) for row in product(norms, drawn, methods)]


#: Rows in the order in which they run; each group is searched and then repeated by all seeds.
GROUPS: list[list[Row]] = [
    [*_group(["layernorm"], DRAWN, ["muon", "adamw"]), *_group(["none"], [1.0], having("norm-free"))],
    _group(["none"], [None], ["muon", "adamw"]),
    _group(["gains", "skip-init"], [1.0], ["muon", "input-held-muon", "adamw"]),
    _group(["rmsnorm", "dyt", "derf"], DRAWN, ["muon", "adamw"]),
    [*_group(["layernorm"], [None], having("norm-free-others")),
     *_group(["none"], [1.0], having("norm-free-others"))],
    _group(["none"], [1.0], having("norm-free-scaled")),
    _group(["gains", "skip-init"], [None], ["muon", "adamw"]),
    _group((norm for norm in NORMS if norm not in _ELSEWHERE), DRAWN, having("norm-free")),
]  # fmt: skip


#: Rows that a page shows.
_SHOWN = [Row(TWIN, None, name) for name in ("adamw", "muon", "whitened-adamw-16", "whitened-muon-16", "soap")]
_SHOWN += [Row("none", None, name) for name in ("adamw", "muon")]
_SHOWN += [Row("none", 1.0, how + name) for name in ("adamw", "muon") for how in ("", "input-scaled-", "input-held-")]
_SHOWN += [Row("none", 1.0, name) for name in ("whitened-adamw-16", "whitened-muon-16", "soap", "normuon", "kron")]


def search(rows: Sequence[Row], run: TextRun, rates: Rates, store: Store, download: bool = False) -> list[TextRun]:
    """For each row, the run of the lowest validation loss, after as many rates as it takes for it to be no edge."""
    return choose([ladder([_of(row, run)], *rates) for row in rows], LANGUAGE, store, download=download)


def _of(row: Row, run: TextRun) -> TextRun:
    (damping,) = dampings(row.method, [1.0])
    run = replace(run, norm=row.norm, embedding_deviation=row.drawn, embedding_lr=row.embedding_lr)
    return replace(run, method=row.method, damping=damping)


def report(store: Store, name: str, folder: Path) -> Sections:
    """A section of every protocol: one table, a row for each of normaliser, embeddings and optimizer."""
    searched, sections = grouped(store.read("search"), _CLIMBED), Sections()
    for own, results in named(name, store.read(), _CLIMBED).items():
        rows, trials = grouped(results, _row), grouped(searched.get(_CLIMBED(results[0]), []), _row)
        tried = {row: [r["settings"]["lr"] for r in found] for row, found in trials.items()}
        order = sorted(rows, key=_order)
        # Of many rows a page shows what a sentence compares: with the counterpart's normaliser, and with none.
        worth = [row in _SHOWN for row in order] if len(order) > 40 else None
        header = ["normaliser", "embeddings", "optimizer", "learning rate", "seeds", "validation loss", "test loss"]
        header += ["validation against LayerNorm (p)", "test against LayerNorm (p)"]
        header += ["RMS of the residual stream", "of the logits"]
        table = Table(header, [_cells(row, rows, tried.get(row, [])) for row in order], worth)
        sections[own] = Section([table, _caption(results, tried.values())])
    return sections


def _row(result: Result) -> Row:
    s = result["settings"]
    return Row(s["norm"], s.get("embedding_deviation"), s["method"], s.get("embedding_lr"))


def _order(row: Row) -> tuple[float, ...]:
    place = list(NORM_LABELS).index(row.norm), DRAWN.index(row.drawn), list(METHODS).index(row.method)
    return *place, row.embedding_lr or 0


def _cells(row: Row, rows: Mapping[Row, list[Result]], tried: Sequence[float]) -> Cells:
    results = rows[row]
    drawn = "0.02" if row.drawn is None else f"{row.drawn:g}"
    if row.embedding_lr is not None:
        drawn += f", rate {row.embedding_lr:g}"
    rates = " or ".join(f"{rate:g}" for rate in sorted({result["settings"]["lr"] for result in results}))
    rates += _at_edge(results[0]["settings"]["lr"], tried)
    first = [NORM_LABELS[row.norm], drawn, METHODS[row.method].label, rates]
    validation, test = _losses(results)
    if math.inf in validation:
        return [*first, str(len(results)), _loss(validation, 3), *[""] * 5]
    beside: Cells = ["", ""]
    twins = [other for other in rows if other.norm == TWIN and other.method == METHODS[row.method].optimizer]
    known = {twin: _losses(rows[twin]) for twin in twins}
    if known and len(validation) > 1:
        twin = min(known, key=lambda twin: mean_and_error(known[twin][0])[0])
        pairs = zip((validation, test), known[twin], strict=True)
        beside = ["counterpart" if twin == row else against(*pair, form="{:+.3f} ({:.2g})") for pair in pairs]
    sizes = [[value or math.inf for value in result["rms"]] for result in results]
    residual = [mean_and_error(column)[0] for column in zip(*sizes, strict=True)]
    largest = max(residual[:-1])
    stream = Cell(f"{residual[0]:.2g} to {largest:.2g}", {"at the first block": residual[0], "largest": largest})
    losses = [exact(len(results)), _loss(validation, 3), _loss(test, 3)]
    return [*first, *losses, *beside, stream, exact(residual[-1], ".2g")]


def _caption(results: list[Result], tried: Iterable[Sequence[float]]) -> str:
    settings, environment = results[0]["settings"], results[0]["environment"]
    clip = settings.get("clip")
    gradients = "gradients as they are" if clip is None else f"gradients cut to a norm of {clip:g}"
    trials = [len(rates) for rates in tried if rates] or [0]
    counts = " to ".join(map(str, sorted({min(trials), max(trials)})))
    seeds = sorted({result["settings"]["seed"] for result in results})
    length = f"{settings['steps']} steps, weight decay {settings['weight_decay']:g}"
    return (
        f"{title(results[0])}, {length}, {gradients}. "
        f"Cross entropy in nats per character, mean ± standard error over seeds {seeds[0]} to {seeds[-1]}. Learning "
        f"rates are the best of {counts} by the validation loss of seed 0, which is not among them; * is an edge of "
        "what was tried. Differences are to LayerNorm with the same bare optimizer and the better embeddings; p is "
        f"Welch's. {machine(environment, settings['device'])}"
    )


def _climbing(
    help: str, hours: float, groups: Sequence[Sequence[Row]], rates: Rates, *,
    steps: int = 400, preset: str = "small", weight_decay: float = 0.0, clip: float | None = None, smoke: str = UNTRIED,
) -> Study:  # fmt: skip
    def run(options: argparse.Namespace, store: Store) -> None:
        like, done = described(options, steps=options.steps, clip=options.clip), set[Row]()
        for group in groups[: options.groups]:
            rows = [row for row in dict.fromkeys(group) if row not in done and lacks(row.method) is None]
            done.update(rows)
            chosen = search(rows, like, rates, store, options.download)
            seeds = range(1, options.seeds + 1)
            run_all([replace(best, seed=seed) for seed in seeds for best in chosen], LANGUAGE, store)

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--groups", type=int, default=len(groups), help="how many groups of rows")
        parser.add_argument("--steps", type=int, default=steps, help="length of the runs")
        parser.add_argument("--seeds", type=int, default=5, help="how many beside 0, which chooses the rate")
        parser.add_argument("--clip", type=float, default=clip, help="what the norm of all gradients is cut to")
        add_arguments(parser, preset, weight_decay)

    makes = [Recipe(hours, decides="--seeds 10")]
    return Study(help, run, report, arguments, makes=makes, data="text", smoke=smoke, page=_PAGE)


_LAYERNORM, _HELD = Row("layernorm", None, "muon"), Row("none", 1.0, "input-held-muon")
#: Adam's step does not grow with what it is added to: embeddings of deviation 1 move by less of themselves.
_FASTER = [[row._replace(embedding_lr=rate)] for rate in (1e-2, 3e-2) for row in (_HELD, _LAYERNORM)]
#: A single normaliser, before the head.
_HEAD = [[Row("head-layernorm", 1.0, method, 3e-2)] for method in ("input-held-muon", "muon")]
#: With Muon alone, and the normalised twin with the same embeddings: what the wrapper adds to both.
_DEEP = [[_LAYERNORM, _HELD], [Row(norm, 1.0, "muon") for norm in ("none", "layernorm")]]
STUDIES = {
    "char-lm": _gridded(
        "optimizers and normalisers on a small language model", Recipe(4.0, options=_TIMES, decides="--seeds 10"),
        searched("char-lm"), _SMALL_TOO, pieces=[_PIECE],
    ),
    "char-lm-2000": _gridded(
        "Muon, plain and whitened, for 2,000 steps", Recipe(1.0, options=_TIMES, decides="--seeds 10"),
        searched("char-lm-2000"), steps=2000,
    ),
    "char-lm-equal-time": _gridded(
        "Muon for as long as whitening takes", Recipe(0.3, options=_EQUAL_TIMES), [], _EQUAL_TIME, figures=False
    ),
    "char-lm-rows": _gridded(
        "whitening by some of the rows", Recipe(0.5, options=("--seeds 5",)), [], _ROWS, figures=False
    ),
    "char-lm-wrappers": _gridded(
        "wrappers against norms", Recipe(1.6), searched("char-lm-wrappers"), _WRAPPERS_TOO, preset="million"
    ),
    "norm-free": _climbing(
        "a language model without normalisers, by InputScaled", 11.0, GROUPS, COARSE, smoke=f"--groups 1 {SMOKE}"
    ),
    # Clipping and decay cost LayerNorm nothing, and the other one gains by them.
    "norm-free-2000": _climbing(
        "the same for 2,000 steps", 9.0, [[_LAYERNORM, _HELD], *_FASTER, *_HEAD], FINE,
        steps=2000, weight_decay=0.1, clip=1.0,
    ),
    "norm-free-deep": _climbing("the same with twelve layers", 4.0, _DEEP, FINE, preset="deep"),
}  # fmt: skip
