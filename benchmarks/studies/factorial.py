"""Every method behind every optimizer, each pair at the best of its own rates and dampings: a full factorial design.

Rates and dampings are chosen by the accuracy that one seed reaches on a tenth of the training set held out, in runs of
full length: from three rates that are the same for all methods behind an optimizer and, while the best is the lowest or
the highest tried, the next one. Accuracies are those of other seeds.
"""

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

from ..core.progress import run_all
from ..core.store import Result, Store, setting
from ..core.study import Recipe, Sections, Study, named, protocol
from ..core.table import (
    Cell,
    Row,
    Section,
    Table,
    against,
    estimate,
    exact,
    grouped,
    in_order,
    machine,
    mean_and_error,
)
from ..core.tune import choose, ladder
from ..images.networks import ACTIVATIONS
from ..images.optimizers import OPTIMIZERS
from ..images.run import Grid, ImageRun, add_arguments, expand
from ..images.train import IMAGES
from ..methods import METHODS, having, optimizer_name
from .comparison import CNN, CNN_POOL, PAPERS, network

RATES = tuple(float(f"{step}e{power}") for power in range(-5, 3) for step in (1, 3))
_SIZED = (0.001, 0.003, 0.01)  # steps of a size of their own
#: The rates that a search begins with, by optimizer.
FIRST = {
    "sgd": (0.03, 0.1, 0.3), "momentum": (0.01, 0.03, 0.1), "adam": _SIZED, "muon": _SIZED, "soap": _SIZED,
}  # fmt: skip
DAMPINGS = (0.1, 0.3, 1.0)
#: The optimizers that every method on the MLP is behind; rivals have others.
ALL_HAVE = ("sgd", "momentum", "adam", "muon")
_PROTOCOL = protocol("activation", "method", "optimizer", "lr", "damping", "seeds", "validation", "backend")
#: What every row is held against, with the same optimizer.
RIVAL = "batchnorm"


def trials(run: ImageRun) -> list[ImageRun]:
    """What a run's rate is looked for with: one seed, validated, for each damping."""
    dampings = DAMPINGS if METHODS[run.method].damped else (None,)
    return [replace(run, seeds=(0,), validation=True, damping=damping) for damping in dampings]


def report(store: Store, name: str, folder: Path) -> Sections:
    """A section of every protocol."""
    searched = grouped(store.read("search"), _PROTOCOL)
    groups = named(name, store.read(), _PROTOCOL)
    return {own: _section(results, searched.get(_PROTOCOL(results[0]), [])) for own, results in groups.items()}


def _section(results: list[Result], searched: list[Result]) -> Section:
    """A table for every activation, a row for each method behind each optimizer."""
    own = setting("activation", "method", "optimizer")
    found, tried = {own(result): result for result in results}, grouped(searched, own)
    parts, activations = list[str | Table](), in_order(ACTIVATIONS, (key[0] for key in found))
    for activation in activations:
        keys = [key for key in product([activation], METHODS, OPTIMIZERS) if key in found]
        rows = [_row(found[key], tried.get(key, []), found.get((activation, RIVAL, key[-1]))) for key in keys]
        header = ["method", "optimizer", "learning rate", "damping", "trials", "test accuracy, %"]
        best = {max((k for k in keys if k[1] == key[1]), key=lambda k: _mean(found[k])) for key in keys}
        # A page shows every method with the optimizer that is best for it, if there are many.
        worth = [key in best for key in keys] if len(keys) > 20 else None
        name = activation if len(activations) > 1 else ""
        table = Table([*header, f"against {METHODS[RIVAL].label} (p)"], rows, worth, name)
        parts += [f"**{network(found[keys[0]])}, {activation}**", table]
    return Section([*parts, _caption(results)])


def _mean(result: Result) -> float:
    return mean_and_error(result["test_accuracy"][-1])[0]


def _row(result: Result, tried: list[Result], rival: Result | None) -> Row:
    settings, accuracies = result["settings"], result["test_accuracy"][-1]
    beside: str | Cell = ""
    if rival is not None and len(accuracies) > 1:
        beside = "counterpart" if settings["method"] == RIVAL else against(accuracies, rival["test_accuracy"][-1])
    chosen = [exact(settings["lr"]), exact(settings.get("damping")), exact(len(tried))]
    return [METHODS[settings["method"]].label, optimizer_name(settings), *chosen, estimate(accuracies), beside]


def _caption(results: list[Result]) -> str:
    settings, environment = results[0]["settings"], results[0]["environment"]
    seeds = settings["seeds"]
    return (
        f"Test accuracy after {settings['epochs']} epochs, mean ± standard error over seeds {seeds[0]} to {seeds[-1]}, "
        f"learning rates falling to 0 by a cosine. Learning rate and damping are the best of the trials, full runs of "
        f"seed 0, on a tenth of the training set held out. Differences are to {METHODS[RIVAL].label} with the same "
        f"optimizer; p is Welch's. Muon steps the inner matrices, Adam the rest, at one learning rate. "
        f"{machine(environment, settings['device'])}"
    )


def best_optimizer(store: Store, method: str | None, activation: str) -> str:
    """The optimizer with which a method was best on held-out data; of none tried a LookupError."""
    key = setting("method", "activation")
    tried = [trial for trial in store.read("search") if key(trial) == (method, activation)]
    tried = [trial for trial in tried if trial["settings"]["optimizer"] in ALL_HAVE]
    if not tried:
        raise LookupError(f"no trials of {method} with {activation}.")
    return str(max(tried, key=lambda trial: trial["score"])["settings"]["optimizer"])


def _study(help: str, page: str, grid: Grid, *makes: Recipe) -> Study:
    grid = {"schedule": "cosine", "data": "cifar10", **grid}

    def run(options: argparse.Namespace, store: Store) -> None:
        final = expand([grid], vars(options))
        searches = [ladder(trials(each), RATES, FIRST[each.optimizer]) for each in final]
        chosen = choose(searches, IMAGES, store, lambda accuracy: -accuracy, download=options.download)
        own = [
            replace(best, seeds=tuple(range(1, len(each.seeds) + 1)), validation=False)
            for best, each in zip(chosen, final, strict=True)
        ]
        run_all(own, IMAGES, store, download=options.download)

    def arguments(parser: argparse.ArgumentParser) -> None:
        names = "data", "method", "activation", "optimizer", "epochs", "seeds", "batch_size", "device"
        add_arguments(parser, *names, grids=[grid])

    return Study(help, run, report, arguments, makes=makes, data="images", page=page)


_CONVOLUTIONS = {
    "method": having("cnn-tuned"),
    "optimizer": ["adam", "muon"], "activation": ["leaky-relu"], "batch_size": 128, "epochs": 10, "backend": "loop",
}  # fmt: skip
_MLP = {  # a whole root for 3,072 inputs takes half a second, 2,300 times in a run
    "method": having("mlp-tuned"), "optimizer": [*ALL_HAVE], "activation": PAPERS["activation"], "epochs": 15,
}  # fmt: skip
_MLP_PAGE, _CNN_PAGE = "docs/results/mlp.md", "docs/results/convolutions.md"
#: With 3,072 inputs a step of SOAP takes a quarter of a second, for the eigenvectors of its covariances.
_RIVALS = "--methods none --optimizers soap", "--methods singd --optimizers momentum"
STUDIES = {
    "cnn-pool-tuned": _study(
        "convolutions and global average pooling, rates and damping tuned", _CNN_PAGE, {**CNN_POOL, **_CONVOLUTIONS},
        Recipe(1.4, decides="--seeds 10"),
    ),
    "cnn-tuned": _study(
        "convolutions without pooling, rates and damping tuned", _CNN_PAGE, {**CNN, **_CONVOLUTIONS}, Recipe(2.0)
    ),
    "mlp-tuned": _study(
        "the paper's MLP behind four optimizers, rates and damping tuned", _MLP_PAGE, _MLP,
        Recipe(5.5, options=("--activations tanh",)),
        Recipe(5.5, "mlp-tuned-leaky", ("--activations leaky-relu",)),
        Recipe(25.0, "mlp-tuned-rivals", tuple(f"--activations tanh {rival}" for rival in _RIVALS)),
    ),
    "mlp-wide-tuned": _study(
        "the same for three hidden layers of 128", _MLP_PAGE, {**_MLP, "hidden": (128, 128, 128)}, Recipe(15.0)
    ),
}  # fmt: skip
