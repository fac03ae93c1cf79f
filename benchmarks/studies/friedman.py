"""Regression without noise, where GaussNewton is of little use: beside a Gaussian process and others, in equal time.

Learning rates are the best of three trials or more of a third of the length, with data and a network of another seed.
"""

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from ..core.arms import Arm, compete, first_trial, variants
from ..core.runs import check_known, measure, run_all
from ..core.store import Result, Store, setting
from ..core.study import Recipe, Sections, Study, Training, check_length
from ..core.tables import Cell, Section, grouped, in_words, machine, pivot
from ..optimizers import OF_MODELS
from ..problems.friedman import BATCH, FRIEDMAN, FUNCTIONS, TEST, FriedmanRun, gaussian_process
from ..train import limit

SECONDS = 15.0
#: The one that tables show; trials have another.
SEED = 1
OPTIMIZERS = ("soap", "adam", "lbfgs", "levenberg-marquardt", "gauss-newton")


def _cells(results: list[Result]) -> dict[tuple[str, tuple[str, int]], Cell]:
    """(method, column) → error, in bold type where it is the lowest of a column."""
    cells = {}
    for column, own in grouped(results, setting("data_set", "points")).items():
        errors = {r["settings"]["optimizer"]: (r["error"][-1], r["seconds"][-1]) for r in own}
        lowest = min(error for error, _ in errors.values() if error is not None)
        for method, (error, seconds) in errors.items():
            text = "diverged" if error is None else f"{error:.2g}"
            numbers = {name: value for name, value in {"": error, "seconds": seconds}.items() if value}
            cells[method, column] = Cell(f"**{text}**" if error == lowest else text, numbers)
    return cells


def report(store: Store, name: str, folder: Path) -> Sections:
    """A row for every method, the lowest errors on the fewest points first; a column for every set of points."""
    results = store.read()
    fewest = min(r["settings"]["points"] for r in results)

    def level(own: list[Result]) -> float:
        errors = [r["error"][-1] or math.inf for r in own if r["settings"]["points"] == fewest]
        return statistics.fmean(map(math.log, errors))

    methods = sorted(grouped(results, setting("optimizer")).items(), key=lambda each: level(each[1]))
    labels = {"gaussian-process": "Gaussian process"} | {name: each.label for name, each in OF_MODELS.items()}
    columns = {
        column: f"Friedman {column[0][-1]}, {column[1]:,} points"
        for column in sorted(grouped(results, setting("data_set", "points")), key=lambda column: column[::-1])
    }
    rows = {method: [labels[method]] for method, _ in methods}
    networks = [r for r in results if r["settings"]["optimizer"] != "gaussian-process"]
    length = networks[0]["settings"]
    time = f"{length['seconds']:g} seconds of one core" if "seconds" in length else f"{length['steps']} steps"
    searches = grouped(store.read("search"), setting("optimizer", "data_set", "points")).values()
    fewest_trials = min(map(len, searches), default=0)
    caption = (
        f"Root mean squared error on {TEST:,} test points, relative to the deviation of their values; one seed, values "
        f"without noise. Tanh networks of two hidden layers of 32, or of 64 for more than {BATCH:,} points, float64, "
        f"Xavier's initialisation, {time} each, in steps of {BATCH:,} points (LBFGS: all). "
        f"Learning rates of SOAP and Adam are the best of {in_words(fewest_trials, 'trial')}, or of more while the "
        "best is the lowest or the highest, and fall to 0 by a cosine. The Gaussian process is "
        f"scikit-learn's, takes its own time and has no column for many points. {machine(results[0]['environment'])}"
    )
    return {name: Section([pivot(["method"], rows, columns, _cells(results)), caption])}


@dataclass
class FriedmanOptions(Training):
    """Options of this study."""

    trials: int = 3  # that choose the learning rate of SOAP and Adam
    points: tuple[int, ...] = (1000, 20000)  # to learn from
    optimizers: tuple[str, ...] = OPTIMIZERS  # that train the network
    steps: int | None = None  # in place of seconds


def _run(options: FriedmanOptions, store: Store) -> None:
    check_known("optimizer", options.optimizers, OPTIMIZERS)
    length = options.steps or SECONDS
    check_length(store, **limit(length))
    shown = [{"seed": SEED, **limit(length)}]
    for count, data_set in product(options.points, FUNCTIONS):
        if count <= BATCH:
            process = partial(gaussian_process, data_set, count, SEED)
            measure(store, {f"Gaussian process, {data_set}, {count} points": process})
        for optimizer in options.optimizers:
            like = FriedmanRun("", "none", data_set=data_set, points=count, **limit(length, 1 / 3))
            if OF_MODELS[optimizer].searches:
                own = replace(like, optimizer=optimizer, lr=1.0 if optimizer == "lbfgs" else None)
                run_all(variants(own, shown), FRIEDMAN, store)
            else:
                first = first_trial(like, Arm("none", optimizer, "none"), starts={"adam": 1e-2, "soap": 1e-2})
                compete(first, options.trials, FRIEDMAN, store, math.log, shown)


STUDIES = {
    "friedman": Study(
        "regression without noise: a Gaussian process, GaussNewton and others", _run, report, FriedmanOptions(),
        makes=[Recipe(0.25)], smoke="--trials 1 --points 30 --steps 1 --optimizers soap gauss-newton",
        page="docs/gauss-newton.md",
    )
}  # fmt: skip
