"""Every method at settings of its own: chosen on a tenth of the training set, and only then trained by all seeds."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..core.progress import run_all
from ..core.store import Result, Store
from ..core.study import Sections, Study
from ..core.table import markdown, mean_and_error
from ..images.networks import ACTIVATIONS
from ..images.run import Grid, ImageRun, add_arguments, expand
from ..images.train import IMAGES
from ..images.tuning import choose, search, trials
from ..methods import METHODS
from .images import accuracy, network

Run = Callable[[argparse.Namespace, Store], None]
Report = Callable[[Store, str, Path], Sections]

_ALL = {"schedule": "cosine", "data": "cifar10"}
#: Both sides of the question, and the plain network.
_RATES = {
    **_ALL,
    "method": ["none", "layernorm", "l2norm", "affine-like", "proportional", "batch-ideal"],
    "activation": list(ACTIVATIONS),
    "optimizer": ["adam", "sgd"],
}
_DIGITS = {**_RATES, "data": "digits", "method": ["none", "layernorm", "affine-like", "batch-ideal", "whitened"]}
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


def _search_rates(options: argparse.Namespace, store: Store, grid: Grid, epochs: int) -> list[ImageRun]:
    """The final runs at the best rates of the grid."""
    final = expand([grid], vars(options))
    run_all(search(final, epochs), IMAGES, store, part="search", download=options.download)
    return choose(final, store.read("search"))


def _try(
    runs: Sequence[ImageRun], tried: Sequence[ImageRun], options: argparse.Namespace, store: Store
) -> list[ImageRun]:
    """The runs at the best of the settings that are tried for them."""
    run_all(tried, IMAGES, store, part="trials", download=options.download)
    return choose(runs, store.read("trials"))


def _run_rates(options: argparse.Namespace, store: Store) -> None:
    run_all(_search_rates(options, store, _RATES, options.search_epochs), IMAGES, store, download=options.download)


def _run_digits(options: argparse.Namespace, store: Store) -> None:
    chosen = _search_rates(options, store, _DIGITS, options.search_epochs)
    run_all(_try(chosen, trials(chosen, options.trials), options, store), IMAGES, store, download=options.download)


def _run_trials(options: argparse.Namespace, store: Store) -> None:
    for (method, optimizer, lr), lengths in _TRIALS.items():
        own = {**_ALL, "method": method, "activation": "tanh", "optimizer": optimizer, "lr": lr, "epochs": lengths[0]}
        final = expand([own], vars(options))
        chosen = _try(final, trials(final, options.trials), options, store)
        longer = [replace(run, epochs=epochs) for epochs in lengths for run in chosen]
        run_all(longer, IMAGES, store, download=options.download)


def _run_long(options: argparse.Namespace, store: Store) -> None:
    for (method, optimizer), (rates, decays, damping) in _LONG.items():
        own = {**_ALL, "method": method, "activation": "tanh", "optimizer": optimizer, "epochs": 40}
        final = expand([own], vars(options))
        tried = [
            replace(run, lr=lr, weight_decay=decay, damping=damping, seeds=run.seeds[:1], validation=True)
            for run in final
            for lr in rates
            for decay in decays
        ]
        run_all(_try(final, tried, options, store), IMAGES, store, download=options.download)


def _report_rates(store: Store, name: str, folder: Path) -> Sections:
    results = store.read()
    heading = f"**{network(results[0])}, rates tuned**"
    return {name: f"{heading}\n\n{_rates_table(results)}\n\n{_rates_caption(results)}"}


def _rates_table(results: list[Result]) -> str:
    """Test accuracy of every method at its chosen rate, by activation and optimizer."""
    found = {(r["settings"]["method"], r["settings"]["activation"], r["settings"]["optimizer"]): r for r in results}
    columns = sorted({key[1:] for key in found}, key=lambda c: (list(ACTIVATIONS).index(c[0]), c[1]))
    rows = []
    for method in (name for name in METHODS if any(key[0] == name for key in found)):
        runs = [found.get((method, *column)) for column in columns]
        cells = [f"{accuracy(run)} ({run['settings']['lr']:g})" if run else "" for run in runs]
        rows.append([METHODS[method].label, *cells])
    return markdown(["method", *(f"{activation}, {optimizer}, %" for activation, optimizer in columns)], rows)


def _rates_caption(results: list[Result]) -> str:
    settings, environment = results[0]["settings"], results[0]["environment"]
    return (
        f"Test accuracy after {settings['epochs']} epochs, mean ± standard error over {len(settings['seeds'])} seeds, "
        f"in brackets the learning rate, falling to 0 by a cosine. Rates were chosen on a tenth of the training set "
        f"held out, one seed, from one grid for all methods. torch {environment['torch']}."
    )


def _report_trials(store: Store, name: str, folder: Path) -> Sections:
    results, tried = store.read(), store.read("trials")
    activations = " and ".join(sorted({r["settings"]["activation"] for r in results}))
    heading = f"**{network(results[0])}, {activations}, every setting tuned**"
    return {name: f"{heading}\n\n{_trials_table(results)}\n\n{_trials_caption(results, tried)}"}


def _trials_table(results: list[Result]) -> str:
    """Test accuracy of every method at the settings its trials chose, best first."""
    rows = []
    several = len({result["settings"]["activation"] for result in results}) > 1
    for result in sorted(results, key=lambda r: -mean_and_error(r["test_accuracy"][-1])[0]):
        settings = result["settings"]
        seconds = statistics.median(result["seconds"]) * settings["epochs"] / len(settings["seeds"])
        names = ("lr", "damping", "weight_decay", "epochs")
        shown = [f"{settings[name]:g}" if name in settings else "" for name in names]
        row = [METHODS[settings["method"]].label, *([settings["activation"]] * several), settings["optimizer"]]
        rows.append([*row, *shown, accuracy(result), f"{seconds:.0f}"])
    header = ["method", *["activation"] * several, "optimizer", "rate", "damping", "weight decay", "epochs"]
    return markdown([*header, "test accuracy, %", "seconds"], rows)


def _trials_caption(results: list[Result], tried: list[Result]) -> str:
    settings, environment = results[0]["settings"], results[0]["environment"]
    keys = [tuple(r["settings"][name] for name in ("method", "activation", "optimizer")) for r in tried]
    counts = {keys.count(key) for key in keys}
    return (
        f"Mean ± standard error over {len(settings['seeds'])} seeds after the last epoch, rates falling to 0 by a "
        f"cosine. Every row's settings are the best of {' or '.join(map(str, sorted(counts)))} combinations of rate, "
        "weight decay and (batch-ideal, whitened) damping, each run for "
        f"{min(r['settings']['epochs'] for r in tried)} epochs with one seed and judged on a tenth of the training "
        "set held out. Weight decay is torch's: AdamW's for adam, SGD's own. Seconds are epochs × the median epoch, "
        f"for one seed of an ensemble of {len(settings['seeds'])}, {environment['threads']} thread(s), on a machine "
        f"busy with other runs: compare them loosely. torch {environment['torch']}."
    )


def _study(help: str, run: Run, report: Report, *names: str, **counts: int) -> Study:
    def arguments(parser: argparse.ArgumentParser) -> None:
        add_arguments(parser, "data", "activation", "seeds", "device", *names)
        for name, count in counts.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=count)

    return Study(help, run, report, arguments)


_CHOICE = "method", "optimizer", "epochs"
_RATES_HELP = "every method at the best of one grid of rates"
_TRIALS_HELP = "the best methods, with rate, weight decay and damping by trials"
STUDIES = {
    "cifar10-tuned": _study(_RATES_HELP, _run_rates, _report_rates, *_CHOICE, search_epochs=3),
    "cifar10-trials": _study(_TRIALS_HELP, _run_trials, _report_trials, trials=8),
    "cifar10-long": _study("the same for forty epochs", _run_long, _report_trials),
    "digits-tuned": _study("all that on digits", _run_digits, _report_trials, *_CHOICE, search_epochs=10, trials=8),
}
