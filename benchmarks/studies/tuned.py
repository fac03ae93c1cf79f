"""Every method at settings of its own: chosen on a tenth of the training set, and only then trained by all seeds.

Grids of rates, and trials that spread over rate, weight decay and damping, choose by runs of the first seed. Behind
every optimizer, a full factorial design, a method climbs from three rates that are the same for all and, while the best
is the lowest or the highest tried, to the next one; accuracies are then those of other seeds.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..core import tune
from ..core.runs import run_all
from ..core.store import Result, Store, setting
from ..core.study import UNTRIED, Recipe, Report, Sections, Study, apart, protocols
from ..core.tables import Cell, Row, Section, Table, against, estimate, exact, grouped, in_order, machine, pivot
from ..ensemble import IMAGES
from ..grids import ALL_HAVE, CNN, CNN_POOL, COMPARED, PAPERS, Grid, GridOptions, expand
from ..methods import METHODS, optimizer_name
from ..optimizers import OF_PARAMETERS
from ..problems.images import ACTIVATIONS, ImageRun, network

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


@dataclass
class TunedOptions(GridOptions):
    """Options of searches."""

    search_epochs: int = 3
    """passes over the training set of runs that choose rates"""
    trials: int = 8
    """how many choose rate, weight decay and damping together, in studies that have trials"""


Run = Callable[[TunedOptions, Store], None]

_ALL = {"schedule": "cosine", "data": "cifar10"}
_RATES = {
    **_ALL,
    "method": ["none", "batchnorm", "layernorm", "l2norm", "affine-like", "proportional", "batch-ideal"],
    "activation": PAPERS["activation"],
    "optimizer": ["adam", "sgd"],
}
_TANH = {**_ALL, "activation": "tanh"}
_DIGITS = {**_RATES, "data": "digits", "method": ["none", "layernorm", "affine-like", "batch-ideal", "whitened"]}
#: Longer, with more decay, around what those trials chose: rates, decays, dampings.
_LONG: dict[tuple[str, str], tuple[list[float], list[float], float | None]] = {
    ("batch-ideal", "sgd"): ([6.0, 12.0], [1.2e-5, 2.4e-5], 1.0),
    ("none", "sgd"): ([0.04, 0.08], [1.8e-3, 3.6e-3], None),
    ("affine-like", "adam"): ([0.003, 0.01], [0.014, 0.028], None),
}


#: Rates that a search of four epochs found best, around which trials look.
_AROUND = [
    ("none", "sgd", 0.1), ("l2norm", "adam", 3e-3), ("affine-like", "adam", 3e-3), ("batch-ideal", "sgd", 10.0),
    ("batch-ideal", "momentum", 1.0), ("batch-ideal", "adam", 1e-3),
]  # fmt: skip


def _best(
    final: Sequence[ImageRun], searches: Sequence[tune.Search], part: str, options: TunedOptions, store: Store
) -> list[ImageRun]:
    """Every run at the settings of its trials that reached the highest validation accuracy."""
    best = tune.choose(searches, IMAGES, store, lambda accuracy: -accuracy, part=part, download=options.download)
    settings = [{name: getattr(trial, name) for name in ("lr", "weight_decay", "damping")} for trial in best]
    return [replace(run, **own) for run, own in zip(final, settings, strict=True)]


def _grids(tried: Iterable[list[ImageRun]]) -> list[tune.Search]:
    return list(map(tune.grid, tried))


def _run_rates(options: TunedOptions, store: Store, grid: Grid, with_trials: bool = False) -> None:
    final = expand([grid], options.given())
    final = _best(final, _grids(search(final, options.search_epochs)), "search", options, store)
    if with_trials:
        final = _best(final, _grids(trials(final, options.trials)), "trials", options, store)
    run_all(final, IMAGES, store, download=options.download)


def _run_trials(options: TunedOptions, store: Store) -> None:
    for method, optimizer, lr in _AROUND:
        lengths = [15, 30] if optimizer == "sgd" else [15]
        own = {**_TANH, "method": method, "optimizer": optimizer, "lr": lr, "epochs": lengths[0]}
        final = expand([own], options.given())
        chosen = _best(final, _grids(trials(final, options.trials)), "trials", options, store)
        longer = [replace(run, epochs=epochs) for epochs in lengths for run in chosen]
        run_all(longer, IMAGES, store, download=options.download)


def _run_long(options: TunedOptions, store: Store) -> None:
    for (method, optimizer), (rates, decays, damping) in _LONG.items():
        final = expand([{**_TANH, "method": method, "optimizer": optimizer, "epochs": 40}], options.given())
        tried = [
            [_trial(run, lr=lr, weight_decay=decay, damping=damping) for lr, decay in product(rates, decays)]
            for run in final
        ]
        run_all(_best(final, _grids(tried), "trials", options, store), IMAGES, store, download=options.download)


def _rates(results: list[Result], name: str, folder: Path) -> Section:
    """Test accuracy of every method at its chosen rate, by activation and optimizer."""
    found = {setting("method", "activation", "optimizer")(r): r for r in results}
    columns = sorted({key[1:] for key in found}, key=lambda c: (list(ACTIVATIONS).index(c[0]), c[1]))
    rows = {method: [METHODS[method].label] for method in in_order(METHODS, (key[0] for key in found))}
    cells = dict[Any, Cell]()
    for (method, *column), run in found.items():
        (text, numbers), rate = estimate(run["test_accuracy"][-1]), run["settings"]["lr"]
        cells[method, tuple(column)] = Cell(f"{text} ({rate:g})", {**numbers, "learning rate": rate})
    table = pivot(["method"], rows, {column: "{}, {}, %".format(*column) for column in columns}, cells)
    settings, environment = results[0]["settings"], results[0]["environment"]
    caption = (
        f"Test accuracy after {settings['epochs']} epochs, mean ± standard error over {len(settings['seeds'])} seeds, "
        f"in brackets the learning rate, falling to 0 by a cosine. Rates were chosen on a tenth of the training set "
        f"held out, one seed, from one grid for all methods. torch {environment['torch']}."
    )
    return Section([f"**{network(results[0])}, rates tuned**", table, caption])


def _mean(result: Result) -> float:
    return statistics.fmean(result["test_accuracy"][-1])


def _report_trials(store: Store, name: str, folder: Path) -> Sections:
    """Test accuracy of every method at the settings its trials chose, best first."""
    results, tried, rows = store.read(), store.read("trials"), list[Row]()
    activations = sorted({result["settings"]["activation"] for result in results})
    several = len(activations) > 1
    for result in sorted(results, key=lambda r: -_mean(r)):
        settings = result["settings"]
        seconds = statistics.median(result["seconds"]) * settings["epochs"] / len(settings["seeds"])
        names = ("lr", "damping", "weight_decay", "epochs")
        shown = [exact(settings.get(name)) for name in names]
        row = [METHODS[settings["method"]].label, *([settings["activation"]] * several), settings["optimizer"]]
        rows.append([*row, *shown, estimate(result["test_accuracy"][-1]), exact(seconds, ".0f")])
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


def _study(help: str, run: Run, report: Report, makes: Sequence[Recipe], smoke: str, **more: Any) -> Study:
    options = TunedOptions(search_epochs=more.pop("search_epochs", 3))
    return Study(help, run, report, options, makes=makes, smoke=smoke, **{"data": "images", "page": _PAGE, **more})


_RATES_HELP = "every method at the best of one grid of rates"
_TRIALS_HELP = "the best methods, with rate, weight decay and damping by trials"
_DIGITS_HELP = "all that on digits"


RATES = tuple(float(f"{step}e{power}") for power in range(-5, 3) for step in (1, 3))
_SIZED = (0.001, 0.003, 0.01)  # steps of a size of their own
#: The rates that a search begins with, by optimizer.
FIRST = {
    "sgd": (0.03, 0.1, 0.3), "momentum": (0.01, 0.03, 0.1), "adam": _SIZED, "muon": _SIZED, "soap": _SIZED,
}  # fmt: skip
DAMPINGS = (0.1, 0.3, 1.0)
_PAIRED = "activation", "method", "optimizer", "lr", "damping", "seeds", "validation", "backend"
#: What every row is held against, with the same optimizer.
RIVAL = "batchnorm"


def laddered(run: ImageRun) -> tune.Search:
    """What chooses the rate of a run of a pair: a ladder for each damping."""
    dampings = DAMPINGS if METHODS[run.method].damped else (None,)
    return tune.ladder([_trial(run, damping=damping) for damping in dampings], RATES, FIRST[run.optimizer])


def report_pairs(store: Store, name: str, folder: Path) -> Sections:
    """A section of every protocol."""
    return {own: _pairs(results, tried) for own, results, tried in protocols(store, name, *_PAIRED)}


def _pairs(results: list[Result], searched: list[Result]) -> Section:
    """A table for every activation, a row for each method behind each optimizer."""
    own = setting("activation", "method", "optimizer")
    found, tried = {own(result): result for result in results}, grouped(searched, own)
    parts, activations = list[str | Table](), in_order(ACTIVATIONS, (key[0] for key in found))
    for activation in activations:
        keys = [key for key in product([activation], METHODS, OF_PARAMETERS) if key in found]
        rows = [_pair(found[key], tried.get(key, []), found.get((activation, RIVAL, key[-1]))) for key in keys]
        header = ["method", "optimizer", "learning rate", "damping", "trials", "test accuracy, %"]
        scores = {key: max((trial["score"] for trial in tried.get(key, [])), default=_mean(found[key])) for key in keys}
        best = {max((k for k in keys if k[1] == key[1]), key=scores.__getitem__) for key in keys}
        # A page shows every method with the optimizer that its trials found best, if there are many.
        worth = [key in best for key in keys] if len(keys) > 20 else None
        name = activation if len(activations) > 1 else ""
        table = Table([*header, f"against {METHODS[RIVAL].label} (p)"], rows, worth, name)
        parts += [f"**{network(found[keys[0]])}, {activation}**", table]
    return Section([*parts, _pairs_caption(results)])


def _pair(result: Result, tried: list[Result], rival: Result | None) -> Row:
    settings, accuracies = result["settings"], result["test_accuracy"][-1]
    beside: str | Cell = ""
    if rival is not None and len(accuracies) > 1:
        beside = "counterpart" if settings["method"] == RIVAL else against(accuracies, rival["test_accuracy"][-1])
    chosen = [exact(settings["lr"]), exact(settings.get("damping")), exact(len(tried))]
    return [
        METHODS[settings["method"]].label,
        optimizer_name(settings),
        *chosen,
        estimate(result["test_accuracy"][-1]),
        beside,
    ]


def _pairs_caption(results: list[Result]) -> str:
    settings, environment = results[0]["settings"], results[0]["environment"]
    seeds = settings["seeds"]
    return (
        f"Test accuracy after {settings['epochs']} epochs, mean ± standard error over seeds {seeds[0]} to {seeds[-1]}, "
        f"learning rates falling to 0 by a cosine. Learning rate and damping are the best of the trials, full runs of "
        f"seed 0, on a tenth of the training set held out. Differences are to {METHODS[RIVAL].label} with the same "
        f"optimizer; p is Welch's. Muon steps the weights of all layers but the last, Adam the rest, at one rate. "
        f"{machine(environment, settings['device'])}"
    )


def _pairs_study(help: str, page: str, grid: Grid, *makes: Recipe, data: str = "images") -> Study:
    grid = {"schedule": "cosine", "data": "cifar10", **grid}

    def run(options: TunedOptions, store: Store) -> None:
        final = expand([grid], options.given())
        chosen = _best(final, list(map(laddered, final)), "search", options, store)
        own = [replace(run, seeds=tuple(range(1, len(run.seeds) + 1))) for run in chosen]
        run_all(own, IMAGES, store, download=options.download)

    return _study(help, run, report_pairs, makes, UNTRIED, data=data, page=page)


_CONVOLUTIONS = {
    "method": ["none", "batchnorm", "layernorm", "whitened", "whitened-16", "input-scaled"],
    "optimizer": ["adam", "muon"], "activation": ["leaky-relu"], "batch_size": 128, "epochs": 10, "backend": "loop",
}  # fmt: skip
#: The methods on the MLP.
ON_MLP = [
    "none", "batchnorm", "layernorm", "rmsnorm", "l2norm", "l2-patch", "affine-like", "proportional", "batch-ideal",
    "whitened-16", "input-scaled", "dyt",
]  # fmt: skip
_MLP = {  # a whole root for 3,072 inputs takes half a second, 2,300 times in a run
    "method": ON_MLP, "optimizer": [*ALL_HAVE], "activation": PAPERS["activation"], "epochs": 15,
}  # fmt: skip
#: What `bench` trains, each with the better of these optimizers.
_DIGIT_PAIRS = {
    "method": [*COMPARED, "whitened-16", "input-scaled"], "optimizer": ["sgd", "adam"], "activation": ["tanh"],
    "data": "digits", "epochs": 20,
}  # fmt: skip
_CNN_PAGE = "docs/results/convolutions.md"
_SOAP_CNN = "--methods none whitened --optimizers soap"
_MORE = "--methods batch-ideal proportional affine-like l2-patch rmsnorm mac --optimizers adam"
_SOAP = "--methods none whitened-16 --optimizers soap"
_PER_ROW = "--methods disproportional --optimizers sgd"
_BLOCKS = "--methods singd-30 --optimizers momentum"
#: A step has one row: the corrections of Eqs. 20 and 21 are exact then.
_ONE_ROW = {
    **_MLP, "method": ["none", "affine-like", "proportional", "disproportional"], "optimizer": ["sgd"],
    "activation": ["tanh"], "batch_size": 1, "epochs": 1,
}  # fmt: skip
_WIDE = "cifar10-trials-128"
STUDIES = {
    "cifar10-tuned": _study(
        _RATES_HELP, partial(_run_rates, grid=_RATES), apart(_rates, "method", "activation", "optimizer", "lr"),
        [Recipe(1.5)], _SMOKE,
    ),
    "cifar10-trials": _study(
        _TRIALS_HELP, _run_trials, _report_trials,
        [Recipe(1.2), Recipe(1.4, _WIDE, (f"--hidden 128 128 128 --name {_WIDE}",))],
        "--seeds 1 --trials 1 --device cpu",
    ),
    "cifar10-long": _study(
        "the same for forty epochs", _run_long, _report_trials, [Recipe(0.8)], "--seeds 1 --device cpu"
    ),
    "digits-tuned": _study(
        _DIGITS_HELP, partial(_run_rates, grid=_DIGITS, with_trials=True), _report_trials, [Recipe(0.1)],
        f"{_SMOKE} --trials 1",
        data="", search_epochs=10,
    ),
    "cnn-pool-tuned": _pairs_study(
        "convolutions and global average pooling, rates and damping tuned", _CNN_PAGE, {**CNN_POOL, **_CONVOLUTIONS},
        Recipe(3.2, options=("", _SOAP_CNN, _MORE), decides="--seeds 10"),
    ),
    "cnn-tuned": _pairs_study(
        "convolutions without pooling, rates and damping tuned", _CNN_PAGE, {**CNN, **_CONVOLUTIONS}, Recipe(2.0)
    ),
    "mlp-tuned": _pairs_study(
        "the paper's MLP behind four optimizers, rates and damping tuned", _PAGE, _MLP,
        Recipe(6.5, options=tuple(f"--activations tanh {each}".strip() for each in ("", _SOAP, _PER_ROW, _BLOCKS))),
        Recipe(5.5, "mlp-tuned-leaky", ("--activations leaky-relu",)),
        Recipe(12.0, "mlp-tuned-k-fac", ("--activations tanh --methods singd --optimizers momentum",)),
    ),
    "mlp-one-row": _pairs_study("per-row corrections where one row makes them exact", _PAGE, _ONE_ROW, Recipe(0.06)),
    "digits-optimizers": _pairs_study(
        "ten methods and two wrappers on digits, rates and damping tuned", _PAGE, _DIGIT_PAIRS, Recipe(0.07), data=""
    ),
    "mlp-wide-tuned": _pairs_study(
        "the same for three hidden layers of 128", _PAGE, {**_MLP, "hidden": (128, 128, 128)},
        Recipe(0.7, options=("--activations tanh --methods affine-like --optimizers muon --seeds 3",)),
        Recipe(15.0, "mlp-wide-tuned-all", ("",)),
    ),
}  # fmt: skip
