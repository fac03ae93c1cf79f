"""Every method at settings of its own: chosen on a tenth of the training set, and only then trained by all seeds."""

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..core.progress import run_all
from ..core.store import Result, Store, setting
from ..core.study import UNTRIED, Recipe, Sections, Study, named, protocol
from ..core.table import Cell, Row, Section, Table, exact, in_order, mean_and_error, pivot
from ..core.tune import choose, grid
from ..images.networks import ACTIVATIONS
from ..images.run import Grid, ImageRun, add_arguments, expand
from ..images.train import IMAGES
from ..methods import METHODS, having
from .comparison import PAPERS, accuracy, grid_study, network
from .sweep import sweep

#: Steps of about three. A rate chosen at an edge says that the best may lie beyond it.
GRIDS: dict[str, tuple[float, ...]] = {
    "sgd": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "adam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "momentum": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
}

#: Where trials look: the rate within this factor of the grid's choice …
RATE_FACTOR = 5.0
#: … the share of a weight that decay takes in one step at the full rate …
SHRINK = (3e-6, 3e-4)
#: … and the dampings, of methods that have one: few, so that many trials of one damping train side by side.
DAMPING = (0.1, 0.3, 1.0, 3.0)


def _trial(run: ImageRun, **settings: Any) -> ImageRun:
    """A run that helps to choose settings: of one seed, validated."""
    return replace(run, seeds=run.seeds[:1], validation=True, **settings)


def search(final: Iterable[ImageRun], epochs: int) -> list[list[ImageRun]]:
    """The runs that choose the rate of each of `final`: every one of the grid, one seed, fewer epochs, validated."""
    return [[_trial(run, lr=lr, epochs=epochs) for lr in GRIDS[run.optimizer]] for run in final]


def trials(chosen: Iterable[ImageRun], count: int) -> list[list[ImageRun]]:
    """`count` trials around every chosen run, of its own length, one seed, validated.

    The trials of all methods are the same points of one Sobol sequence: rate and weight decay, each spread
    evenly over the logarithm of its range, and damping, which a method without one leaves unused.
    """
    points = torch.quasirandom.SobolEngine(3, scramble=True, seed=0).draw(count, dtype=torch.float64).tolist()
    return [[_at(run, *point) for point in points] for run in chosen]


def _at(run: ImageRun, u: float, v: float, w: float) -> ImageRun:
    """The trial at a point of the unit cube."""
    (low, high), lowest = SHRINK, run.lr / RATE_FACTOR
    rate = lowest * (run.lr * RATE_FACTOR / lowest) ** u
    decay = low * (high / low) ** v * (0.1 if run.optimizer == "momentum" else 1.0) / rate
    damping = DAMPING[int(w * len(DAMPING))] if METHODS[run.method].damped else None
    return _trial(run, lr=float(f"{rate:.2g}"), weight_decay=float(f"{decay:.2g}"), damping=damping)


Run = Callable[[argparse.Namespace, Store], None]
Report = Callable[[Store, str, Path], Sections]

_ALL = {"schedule": "cosine", "data": "cifar10"}
_RATES = {**_ALL, "method": having("cifar10-tuned"), "activation": PAPERS["activation"], "optimizer": ["adam", "sgd"]}
_TANH = {**_ALL, "activation": "tanh"}
_DIGITS = {**_RATES, "data": "digits", "method": having("digits-tuned")}
#: Around these rates, of a search of four epochs, and at these lengths.
_TRIALS = {
    ("batch-ideal", "sgd", 10.0): [15, 30],
    ("batch-ideal", "momentum", 1.0): [15],
    ("batch-ideal", "adam", 1e-3): [15],
    ("none", "sgd", 0.1): [15, 30],
    ("affine-like", "adam", 3e-3): [15],
    ("l2norm", "adam", 3e-3): [15],
}
#: Longer, with more decay, around what those trials chose: rates, decays, dampings.
_LONG: dict[tuple[str, str], tuple[list[float], list[float], float | None]] = {
    ("batch-ideal", "sgd"): ([6.0, 12.0], [1.2e-5, 2.4e-5], 1.0),
    ("none", "sgd"): ([0.04, 0.08], [1.8e-3, 3.6e-3], None),
    ("affine-like", "adam"): ([0.003, 0.01], [0.014, 0.028], None),
}


def _best(
    final: Sequence[ImageRun], tried: list[list[ImageRun]], part: str, options: argparse.Namespace, store: Store
) -> list[ImageRun]:
    """Every run at the settings of its trials that reached the highest validation accuracy."""
    searches = list(map(grid, tried))
    best = choose(searches, IMAGES, store, lambda accuracy: -accuracy, part=part, download=options.download)
    settings = [{name: getattr(trial, name) for name in ("lr", "weight_decay", "damping")} for trial in best]
    return [replace(run, **own) for run, own in zip(final, settings, strict=True)]


def _run_rates(options: argparse.Namespace, store: Store) -> None:
    final = expand([_RATES if options.study == "cifar10-tuned" else _DIGITS], vars(options))
    final = _best(final, search(final, options.search_epochs), "search", options, store)
    if "trials" in options:
        final = _best(final, trials(final, options.trials), "trials", options, store)
    run_all(final, IMAGES, store, download=options.download)


def _run_trials(options: argparse.Namespace, store: Store) -> None:
    for (method, optimizer, lr), lengths in _TRIALS.items():
        own = {**_TANH, "method": method, "optimizer": optimizer, "lr": lr, "epochs": lengths[0]}
        final = expand([own], vars(options))
        chosen = _best(final, trials(final, options.trials), "trials", options, store)
        longer = [replace(run, epochs=epochs) for epochs in lengths for run in chosen]
        run_all(longer, IMAGES, store, download=options.download)


def _run_long(options: argparse.Namespace, store: Store) -> None:
    for (method, optimizer), (rates, decays, damping) in _LONG.items():
        final = expand([{**_TANH, "method": method, "optimizer": optimizer, "epochs": 40}], vars(options))
        tried = [
            [_trial(run, lr=lr, weight_decay=decay, damping=damping) for lr, decay in product(rates, decays)]
            for run in final
        ]
        run_all(_best(final, tried, "trials", options, store), IMAGES, store, download=options.download)


def _report_rates(store: Store, name: str, folder: Path) -> Sections:
    """A table of every protocol."""
    protocols = protocol("method", "activation", "optimizer", "lr")
    return {own: _rates_table(results) for own, results in named(name, store.read(), protocols).items()}


def _rates_table(results: list[Result]) -> Section:
    """Test accuracy of every method at its chosen rate, by activation and optimizer."""
    found = {setting("method", "activation", "optimizer")(r): r for r in results}
    columns = sorted({key[1:] for key in found}, key=lambda c: (list(ACTIVATIONS).index(c[0]), c[1]))
    rows = {method: [METHODS[method].label] for method in in_order(METHODS, (key[0] for key in found))}
    cells = {(method, tuple(column)): _with_rate(run) for (method, *column), run in found.items()}
    table = pivot(["method"], rows, {column: "{}, {}, %".format(*column) for column in columns}, cells)
    settings, environment = results[0]["settings"], results[0]["environment"]
    caption = (
        f"Test accuracy after {settings['epochs']} epochs, mean ± standard error over {len(settings['seeds'])} seeds, "
        f"in brackets the learning rate, falling to 0 by a cosine. Rates were chosen on a tenth of the training set "
        f"held out, one seed, from one grid for all methods. torch {environment['torch']}."
    )
    return Section([f"**{network(results[0])}, rates tuned**", table, caption])


def _with_rate(run: Result) -> Cell:
    (text, numbers), rate = accuracy(run), run["settings"]["lr"]
    return Cell(f"{text} ({rate:g})", {**numbers, "learning rate": rate})


def _report_trials(store: Store, name: str, folder: Path) -> Sections:
    """Test accuracy of every method at the settings its trials chose, best first."""
    results, tried, rows = store.read(), store.read("trials"), list[Row]()
    activations = sorted({result["settings"]["activation"] for result in results})
    several = len(activations) > 1
    for result in sorted(results, key=lambda r: -mean_and_error(r["test_accuracy"][-1])[0]):
        settings = result["settings"]
        seconds = statistics.median(result["seconds"]) * settings["epochs"] / len(settings["seeds"])
        names = ("lr", "damping", "weight_decay", "epochs")
        shown = [exact(settings.get(name)) for name in names]
        row = [METHODS[settings["method"]].label, *([settings["activation"]] * several), settings["optimizer"]]
        rows.append([*row, *shown, accuracy(result), exact(seconds, ".0f")])
    header = ["method", *["activation"] * several, "optimizer", "rate", "damping", "weight decay", "epochs"]
    table = Table([*header, "test accuracy, %", "seconds"], rows)
    settings, environment = results[0]["settings"], results[0]["environment"]
    counts = Counter(map(setting("method", "activation", "optimizer"), tried))
    caption = (
        f"Mean ± standard error over {len(settings['seeds'])} seeds after the last epoch, rates falling to 0 by a "
        f"cosine. Every row's settings are the best of {' or '.join(map(str, sorted(set(counts.values()))))} "
        "combinations of rate, weight decay and (batch-ideal, whitened) damping, each run for "
        f"{min(r['settings']['epochs'] for r in tried)} epochs with one seed and judged on a tenth of the training "
        "set held out. Weight decay is torch's: AdamW's for adam, SGD's own. Seconds are epochs × the median epoch, "
        f"for one seed of an ensemble of {len(settings['seeds'])}, {environment['threads']} thread(s), on a machine "
        f"busy with other runs: compare them loosely. torch {environment['torch']}."
    )
    heading = f"**{network(results[0])}, {' and '.join(activations)}, every setting tuned**"
    return {name: Section([heading, table, caption])}


_PAGE = "docs/results/mlp.md"
_SMOKE = "--methods none --optimizers sgd --activations tanh --epochs 1 --seeds 1 --search-epochs 1 --device cpu"
#: Options of their own.
_COUNTS = {
    "search_epochs": "passes over the training set of runs that choose rates",
    "trials": "how many choose rate, weight decay and damping together",
}


def _study(
    help: str, run: Run, report: Report, grid: Grid, recipe: Recipe, smoke: str, *names: str,
    data: str = "images", **counts: int,
) -> Study:  # fmt: skip
    def arguments(parser: argparse.ArgumentParser) -> None:
        add_arguments(parser, "data", "activation", "seeds", "device", *names, grids=[grid])
        for name, count in counts.items():
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, type=int, default=count, metavar="COUNT", help=_COUNTS[name])

    return Study(help, run, report, arguments, makes=[recipe], smoke=smoke, data=data, page=_PAGE)


#: Which rates train plain SGD, with BatchIdeal as it is by default and without it, whatever the batch size.
_DEFAULTS = {
    "data": "digits", "method": ["none", "batch-ideal-default"], "activation": ["tanh"], "optimizer": "sgd",
    "lr": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0], "batch_size": [8, 32, 128], "epochs": 10, "seeds": 3,
}  # fmt: skip
_CHOICE = "method", "optimizer", "epochs"
_RATES_HELP = "every method at the best of one grid of rates"
_TRIALS_HELP = "the best methods, with rate, weight decay and damping by trials"
_DIGITS_HELP = "all that on digits"
STUDIES = {
    "cifar10-tuned": _study(
        _RATES_HELP, _run_rates, _report_rates, _RATES, Recipe(1.5), _SMOKE, *_CHOICE, search_epochs=3
    ),
    "cifar10-trials": _study(
        _TRIALS_HELP, _run_trials, _report_trials, _TANH, Recipe(1.2), "--seeds 1 --trials 1 --device cpu",
        "hidden", trials=8,
    ),
    "cifar10-long": _study(
        "the same for forty epochs", _run_long, _report_trials, _TANH, Recipe(0.8), "--seeds 1 --device cpu"
    ),
    "rates": grid_study(
        "rates that train SGD with and without BatchIdeal; minutes", [_DEFAULTS], sweep("rate"),
        makes=[Recipe(0.2)], data="", smoke=UNTRIED, page=_PAGE,
    ),
    "digits-tuned": _study(
        _DIGITS_HELP, _run_rates, _report_trials, _DIGITS, Recipe(0.1), f"{_SMOKE} --trials 1", *_CHOICE,
        data="", search_epochs=10, trials=8,
    ),
}  # fmt: skip
