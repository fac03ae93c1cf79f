"""Every method at settings of its own: chosen on a tenth of the training set, and only then trained by all seeds.

Grids of rates, and trials that spread over rate, weight decay and damping, choose by runs of the first seed. Behind
every optimizer, a full factorial design, a method climbs from three rates that are the same for all and, while the best
is the lowest or the highest tried, to the next one; accuracies are then those of other seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ..core import tune
from ..core.runs import run_all
from ..core.store import Result, Store, setting
from ..core.study import Recipe, Sections, Study, protocols, refuse_given
from ..core.tables import Cell, Section, Table, against, estimate, exact, grouped, in_order
from ..ensemble import IMAGES
from ..grids import ALL_HAVE, CNN_POOL, COMPARED, PAPERS, Grid, TunedOptions, every_rate, expand, trial, trials
from ..methods import METHODS, optimizer_name
from ..optimizers import OF_PARAMETERS
from ..problems.images import ACTIVATIONS, ImageRun, network, trained

#: The rates of ladders, those that one begins with, by optimizer, and the dampings that each have one.
RATES = tuple(float(f"{step}e{power}") for power in range(-5, 3) for step in (1, 3))
_SIZED = (0.001, 0.003, 0.01)  # steps of a size of their own
FIRST = {
    "sgd": (0.03, 0.1, 0.3), "momentum": (0.01, 0.03, 0.1), "adam": _SIZED, "muon": _SIZED, "soap": _SIZED,
}  # fmt: skip
DAMPINGS = (0.1, 0.3, 1.0)
#: Those that have ladders as well where the best is the last of these.
LARGER = (3.0, 10.0, 100.0)


def _ladder(run: ImageRun, options: TunedOptions) -> tune.Search:
    """A ladder of rates for each damping, larger ones among them where the best of the others is their last."""

    def over(dampings: Sequence[float | None]) -> tune.Search:
        return tune.ladder([trial(run, damping=damping) for damping in dampings], RATES, FIRST[run.optimizer])

    if not METHODS[run.method].damped:
        return over([None])
    first, larger = over(DAMPINGS), over(LARGER)

    def search(tried: tune.Tried) -> Sequence[ImageRun]:
        if new := first(tried):
            return new
        best: ImageRun = min(tried, key=tried.__getitem__)
        return larger(tried) if (best.damping or 0.0) >= DAMPINGS[-1] else []

    return search


#: The part of the store that keeps trials, and what chooses the settings of a run.
Stage = tuple[str, Callable[[ImageRun, TunedOptions], tune.Search]]
BY_RATE: Stage = ("search", lambda run, options: tune.grid(every_rate(run, options)))
BY_TRIALS: Stage = ("trials", lambda run, options: tune.grid(trials(run, options)))
BY_LADDER: Stage = ("search", _ladder)


def _study(
    help: str, arms: Sequence[tuple[Grid, Sequence[Stage]]], *makes: Recipe,
    then: Callable[[ImageRun], list[ImageRun]] = lambda run: [run], search_epochs: int = 3, **more: Any,
) -> Study:  # fmt: skip
    """A study of grids, each with the stages that choose the settings of its runs; `then` has what is trained at last.

    The rest is the study's own.
    """

    def run(options: TunedOptions, store: Store) -> None:
        for name, stage in (("search_epochs", BY_RATE), ("trials", BY_TRIALS)):
            if not any(stage in stages for _, stages in arms):
                refuse_given(options, [name], "on this study; leave it out")
        for grid, stages in arms:
            final = expand([{"schedule": "cosine", "data": "cifar10", **grid}], options.given())
            for part, chooser in stages:  # at the settings of the highest validation accuracy
                searches = [chooser(run, options) for run in final]
                best = tune.choose(
                    searches, IMAGES, store, lambda accuracy: -accuracy, part=part, download=options.download
                )
                final = [
                    replace(run, lr=own.lr, weight_decay=own.weight_decay, damping=own.damping)
                    for run, own in zip(final, best, strict=True)
                ]
            run_all([each for chosen in final for each in then(chosen)], IMAGES, store, download=options.download)

    entry = {"data": "images", "page": "docs/results/mlp.md", "makes": makes, **more}
    return Study(help, run, report, TunedOptions(search_epochs=search_epochs), **entry)


#: What every row is held against, with the same optimizer.
RIVAL = "batchnorm"
_WITHIN = (
    "activation", "method", "optimizer", "lr", "damping", "weight_decay", "epochs", "seeds", "validation", "backend",
)  # fmt: skip


#: Activation, method, optimizer, epochs.
_KEY = setting("activation", "method", "optimizer", "epochs")


def report(store: Store, name: str, folder: Path) -> Sections:
    """A section of every protocol."""
    return {own: _section(results, tried) for own, results, tried in protocols(store, name, *_WITHIN)}


def _section(results: list[Result], searched: list[Result]) -> Section:
    """A table with a row for each activation, and method behind each optimizer, of each length."""
    at, tried = {_KEY(result): result for result in results}, grouped(searched, lambda trial: _KEY(trial)[:3])
    activations, lengths = in_order(ACTIVATIONS, (key[0] for key in at)), sorted({key[-1] for key in at})
    arms, rows = [arm for arm in product(activations, METHODS, OF_PARAMETERS, lengths) if arm in at], []
    for arm in arms:
        own, accuracies, rival = at[arm]["settings"], _accuracies(at[arm]), at.get((arm[0], RIVAL, *arm[2:]))
        beside: str | Cell = "counterpart" if arm[1] == RIVAL else ""
        if rival and not beside and len(accuracies) > 1:
            beside = against(accuracies, _accuracies(rival))
        rows.append({
            "activation": arm[0] if len(activations) > 1 else "",
            "method": METHODS[arm[1]].label,
            "optimizer": optimizer_name(own),
            "epochs": exact(arm[-1] if len(lengths) > 1 else None),
            "learning rate": exact(own["lr"]),
            "damping": exact(own.get("damping")),
            "weight decay": exact(own.get("weight_decay")),
            "trials": exact(len(tried.get(arm[:3], []))),
            "test accuracy, %": estimate(accuracies),
            f"against {METHODS[RIVAL].label} (p)": beside,
        })  # fmt: skip
    caption = f"Settings are the best of trials of seed 0 on held-out images; p is Welch's. {trained(results)}"
    return Section([f"**{network(results[0])}, {' and '.join(activations)}**", Table.of(rows), caption])


def _accuracies(result: Result) -> list[float]:
    return result["test_accuracy"][-1]


_RATES: Grid = {
    "method": ["none", "batchnorm", "layernorm", "l2norm", "affine-like", "proportional", "batch-ideal"],
    "activation": PAPERS["activation"], "optimizer": ["adam", "sgd"],
}  # fmt: skip
_DIGITS: Grid = {
    **_RATES, "data": "digits", "method": ["none", "layernorm", "affine-like", "batch-ideal", "whitened"],
}  # fmt: skip
#: Method, optimizer, and the rate that a search of four epochs found best, around which trials look.
_AROUND = [
    ("none", "sgd", 0.1), ("l2norm", "adam", 3e-3), ("affine-like", "adam", 3e-3), ("batch-ideal", "sgd", 10.0),
    ("batch-ideal", "momentum", 1.0), ("batch-ideal", "adam", 1e-3),
]  # fmt: skip


def _tanh(method: str, optimizer: str, **settings: Any) -> Grid:
    return {"method": method, "optimizer": optimizer, "activation": "tanh", **settings}


def _each(rates: list[float], decays: list[float], damping: float | None = None) -> Stage:
    """Trials of every rate with every decay."""

    def chooser(run: ImageRun, options: TunedOptions) -> tune.Search:
        return tune.grid(trial(run, lr=r, weight_decay=decay, damping=damping) for r, decay in product(rates, decays))

    return "trials", chooser


#: Longer, with more decay, around what trials chose.
_LONG: list[tuple[Grid, list[Stage]]] = [
    (_tanh("batch-ideal", "sgd", epochs=40), [_each([6.0, 12.0], [1.2e-5, 2.4e-5], 1.0)]),
    (_tanh("none", "sgd", epochs=40), [_each([0.04, 0.08], [1.8e-3, 3.6e-3])]),
    (_tanh("affine-like", "adam", epochs=40), [_each([0.003, 0.01], [0.014, 0.028])]),
]


def _pairs_study(help: str, grid: Grid, *makes: Recipe, **more: Any) -> Study:
    """A study of every method behind every optimizer, whose trials have a seed of their own."""

    def other_seeds(run: ImageRun) -> list[ImageRun]:
        return [replace(run, seeds=tuple(range(1, len(run.seeds) + 1)))]

    return _study(help, [(grid, [BY_LADDER])], *makes, then=other_seeds, **more)


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
#: A step has one row: the corrections of Eqs. 20 and 21 are exact then.
_ONE_ROW = {
    **_MLP, "method": ["none", "affine-like", "proportional", "disproportional"], "optimizer": ["sgd"],
    "activation": ["tanh"], "batch_size": 1, "epochs": 1,
}  # fmt: skip

_SOAP_CNN = "--methods none batchnorm whitened --optimizers soap"
_MORE = "--methods batch-ideal proportional affine-like l2-patch rmsnorm mac --optimizers adam"
#: What follows the whole on tanh: SOAP, the corrections of rows, K-FAC in blocks of its steps.
_ON_TANH = (
    "", " --methods none whitened-16 --optimizers soap", " --methods disproportional --optimizers sgd",
    " --methods singd-30 --optimizers momentum",
)  # fmt: skip
#: Inputs centred, the plainest remedy for what corrections and whitening remove.
_CENTRED = "--departure centred --methods none batch-ideal --activations tanh --optimizers sgd adam --name mlp-centred"
_CENTRED_CNN = "--departure centred --methods none batchnorm mac whitened-16 --optimizers adam --name cnn-centred"
_WIDE = "cifar10-trials-128"
_SMALL = "--seeds 1 --device cpu"
_SMOKE = f"--methods none --optimizers sgd --activations tanh --epochs 1 --search-epochs 1 {_SMALL}"
STUDIES = {
    "cifar10-tuned": _study(
        "every method at the best of one grid of rates", [(_RATES, [BY_RATE])], Recipe(1.5), smoke=_SMOKE
    ),
    "cifar10-trials": _study(
        "the best methods, with rate, weight decay and damping by trials",
        [(_tanh(*arm, lr=lr, epochs=15), [BY_TRIALS]) for *arm, lr in _AROUND],
        Recipe(1.2), Recipe(1.4, _WIDE, (f"--hidden 128 128 128 --name {_WIDE}",)),
        then=lambda run: [run, replace(run, epochs=30)] if run.optimizer == "sgd" else [run],  # twice the length
        smoke=f"--trials 1 {_SMALL}",
    ),
    "cifar10-long": _study("the same for forty epochs", _LONG, Recipe(0.8), smoke=_SMALL),
    "digits-tuned": _study(
        "all that on digits", [(_DIGITS, [BY_RATE, BY_TRIALS])], Recipe(0.1),
        smoke=f"{_SMOKE} --trials 1", data="", search_epochs=10,
    ),
    "cnn-pool-tuned": _pairs_study(
        "convolutions and global average pooling, rates and damping tuned", {**CNN_POOL, **_CONVOLUTIONS},
        Recipe(4.6, options=("", _SOAP_CNN, _MORE)),
        Recipe(1.4, "cnn-centred", (_CENTRED_CNN,)), page="docs/results/convolutions.md",
    ),
    "mlp-tuned": _pairs_study(
        "the paper's MLP behind four optimizers, rates and damping tuned", _MLP,
        Recipe(8.5, options=tuple(f"--activations tanh{each}" for each in _ON_TANH)),
        Recipe(1.0, "mlp-centred", (_CENTRED,)),
    ),
    "mlp-one-row": _pairs_study("per-row corrections where one row makes them exact", _ONE_ROW, Recipe(0.06)),
    "digits-optimizers": _pairs_study(
        "ten methods and two wrappers on digits, rates and damping tuned", _DIGIT_PAIRS, Recipe(0.07), data=""
    ),
}  # fmt: skip
