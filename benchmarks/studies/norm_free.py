"""The language model without normalisers: what takes their place, by optimizer and by how embeddings are drawn.

A rate is chosen for every normaliser, way to draw the embeddings and optimizer, by the validation loss of seed 0: from
rates that are the same for all that are compared and, while the best is the lowest or the highest tried, the next one.
Losses are of other seeds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from examples.gpt import NORM_LABELS, NORMS

from ..core.runs import run_all
from ..core.store import Result, Store, setting
from ..core.study import UNTRIED, Recipe, Sections, Study, protocols
from ..core.tables import Row, Section, Table, against, exact, grouped, mean_and_error
from ..core.tune import choose, ladder
from ..methods import METHODS
from ..problems.language import LANGUAGE, dampings, title
from .language import PAGE, SMOKE, TextOptions, about, loss_cell, losses_of


class Arm(NamedTuple):
    """What is compared, each at a rate of its own: a row of the table."""

    norm: str
    embedding_deviation: float | None
    method: str
    embedding_lr: float | None = None  # None is that of the other weights


def _group(norms: Iterable[str], deviations: Iterable[float | None], methods: Iterable[str]) -> list[Arm]:
    return [Arm(*row) for row in product(norms, deviations, methods)]


#: Deviation of the embeddings: GPT-2's, or one.
DEVIATIONS: tuple[float | None, ...] = (None, 1.0)
#: Rates, ascending, and those that a search begins with.
Rates = tuple[tuple[float, ...], tuple[float, ...]]
COARSE: Rates = ((3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1), (3e-3, 1e-2, 3e-2))
FINE: Rates = ((5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 2e-2, 3e-2), (2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 2e-2))
_BETWEEN: Rates = ((*FINE[0], 1e-1, 3e-1), (3e-3, 5e-3, 7e-3, 1e-2, 2e-2, 3e-2))
#: Rows whose rates are closer together than those of others: without norms Muon and SOAP break down above their best.
_WITHOUT = ["muon", "input-scaled-muon", "input-held-muon", "soap", "normuon", "whitened-muon-16", "whitened-muon"]
CLOSE = _group(["none"], [1.0], [*_WITHOUT, "preconditioned-muon", "input-scaled-soap", "input-scaled-normuon"])
#: Rows that are judged by twice as many seeds as others.
TWICE = [
    *_group(["layernorm"], [None], ["muon", "adamw", "whitened-adamw-16"]),
    *_group(["none"], [1.0], ["muon", "input-held-muon", "soap"]),
]
#: The normalised network that every row is held against, behind the same kind of optimizer.
TWIN = "layernorm"
#: Normalisers that have a table of their own: the long runs have the single one before the head.
_ELSEWHERE = ("affine-like", "head-layernorm")

SCALED = ["adamw", "muon", *(f"input-{how}-{name}" for name in ("adamw", "muon") for how in ("scaled", "held"))]
OTHERS = [
    "whitened-adamw", "whitened-muon", "whitened-adamw-16", "whitened-muon-16", "soap", "preconditioned-adamw",
    "preconditioned-muon", "normuon", "kron", "mars", "kfac",
]  # fmt: skip
#: Rows in the order in which they run; each group is searched and then repeated by all seeds.
GROUPS: list[list[Arm]] = [
    [*_group(["layernorm"], DEVIATIONS, ["muon", "adamw"]), *_group(["none"], [1.0], SCALED)],
    _group(["none"], [None], ["muon", "adamw"]),
    _group(["gains", "skip-init"], [1.0], ["muon", "input-held-muon", "adamw"]),
    _group(["rmsnorm", "dyt", "derf"], DEVIATIONS, ["muon", "adamw"]),
    [*_group(["layernorm"], [None], OTHERS), *_group(["none"], [1.0], OTHERS)],
    _group(["none"], [1.0], ["input-scaled-soap", "input-scaled-normuon"]),
    _group(["gains", "skip-init"], [None], ["muon", "adamw"]),
    _group((norm for norm in NORMS if norm not in _ELSEWHERE), DEVIATIONS, SCALED),
]


def report(store: Store, name: str, folder: Path) -> Sections:
    """A section of every protocol: one table, a row for each of normaliser, embeddings and optimizer."""
    sections: Sections = {}
    for own, results, searched in protocols(store, name, *Arm._fields, "lr", "damping", "seed"):
        rows, tried = grouped(results, _row), grouped(searched, _row)
        header = ["normaliser", "embeddings", "optimizer", "learning rate", "seeds", "validation loss", "test loss"]
        header += ["validation against LayerNorm (p)", "test against LayerNorm (p)"]
        order = sorted(rows, key=lambda row: (
            list(NORM_LABELS).index(row.norm), DEVIATIONS.index(row.embedding_deviation),
            list(METHODS).index(row.method), row.embedding_lr or 0,
        ))  # fmt: skip
        table = Table(header, [_cells(row, rows, tried.get(row, [])) for row in order])
        heading = f"**{title(results[0])}, {results[0]['settings']['steps']} steps**"
        caption = f"* is an edge of what was tried; p is Welch's. {about(results)}"
        sections[own] = Section([heading, table, caption])
    return sections


def _row(result: Result) -> Arm:
    return Arm(*map(result["settings"].get, Arm._fields))


def _cells(row: Arm, rows: Mapping[Arm, list[Result]], trials: Iterable[Result]) -> Row:
    results, tried = rows[row], set(map(setting("lr"), trials))
    embeddings = f"{row.embedding_deviation or 0.02:g}"
    embeddings += "" if row.embedding_lr is None else f", rate {row.embedding_lr:g}"
    rates = " or ".join(f"{rate:g}" for rate in sorted({result["settings"]["lr"] for result in results}))
    rates += "*" * (len(tried) > 1 and results[0]["settings"]["lr"] in (min(tried), max(tried)))
    first = [NORM_LABELS[row.norm], embeddings, METHODS[row.method].label, rates]
    validation, test = losses_of(results)
    if math.inf in validation:
        return [*first, str(len(results)), loss_cell(validation, 3), *[""] * 3]
    beside: Row = ["", ""]
    twins = [other for other in rows if other.norm == TWIN and other.method == METHODS[row.method].optimizer]
    known = {twin: losses_of(rows[twin]) for twin in twins}
    if known and len(validation) > 1:
        twin = min(known, key=lambda twin: mean_and_error(known[twin][0])[0])
        pairs = zip((validation, test), known[twin], strict=True)
        beside = ["counterpart" if twin == row else against(*pair, form="{:+.3f} ({:.2g})") for pair in pairs]
    return [*first, exact(len(results)), loss_cell(validation, 3), loss_cell(test, 3), *beside]


@dataclass
class NormFreeOptions(TextOptions):
    """Options of these studies."""

    groups: int | None = None  # how many groups of rows; all by default
    steps: int = 400  # length of the runs
    seeds: int = 5  # how many beside 0, which chooses the rate; some rows have twice as many
    clip: float | None = None  # what the norm of all gradients is cut to


def _study(
    help: str, hours: float, groups: Sequence[Sequence[Arm]], rates: Rates, *,
    smoke: str = UNTRIED, **defaults: Any,
) -> Study:  # fmt: skip
    """A study whose rows each have a rate of their own, and are then run by all seeds, group by group."""

    def run(options: NormFreeOptions, store: Store) -> None:
        like = options.run(steps=options.steps, clip=options.clip)
        for rows in groups[: options.groups]:
            ladders = []
            for row in rows:
                (damping,) = dampings(row.method, [1.0])
                first = replace(like, **row._asdict(), damping=damping)
                ladders.append(ladder([first], *(_BETWEEN if rates is COARSE and row in CLOSE else rates)))
            chosen = choose(ladders, LANGUAGE, store, download=options.download)
            most = [2 * options.seeds if rates is COARSE and row in TWICE else options.seeds for row in rows]
            shown = [replace(run, seed=s) for run, n in zip(chosen, most, strict=True) for s in range(1, n + 1)]
            run_all(shown, LANGUAGE, store)

    makes = [Recipe(hours)]
    return Study(help, run, report, NormFreeOptions(**defaults), makes=makes, data="text", smoke=smoke, page=PAGE)


_PAIR = [Arm("layernorm", None, "muon"), Arm("none", 1.0, "input-held-muon")]
#: Adam's step does not grow with what it is added to: embeddings of deviation 1 move by less of themselves.
_FASTER = [[row._replace(embedding_lr=rate)] for rate in (1e-2, 3e-2) for row in _PAIR[::-1]]
#: A single normaliser, before the head.
_HEAD = [[Arm("head-layernorm", 1.0, method, 3e-2)] for method in ("input-held-muon", "muon")]
#: With Muon alone, and the normalised twin with the same embeddings: what the wrapper adds to both.
_DEEP = [_PAIR, [Arm(norm, 1.0, "muon") for norm in ("none", "layernorm")]]
STUDIES = {
    "norm-free": _study(
        "a language model without normalisers, by InputScaled", 11.0, GROUPS, COARSE, smoke=f"--groups 1 {SMOKE}"
    ),
    # Clipping and decay cost LayerNorm nothing, and the other one gains by them.
    "norm-free-2000": _study(
        "the same for 2,000 steps", 9.0, [_PAIR, *_FASTER, *_HEAD], FINE,
        steps=2000, weight_decay=0.1, clip=1.0,
    ),
    "norm-free-deep": _study("the same with twelve layers", 4.0, _DEEP, FINE, preset="deep"),
}  # fmt: skip
