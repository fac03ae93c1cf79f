"""Does less divergence train better: the divergence of real steps along tuned runs, beside the accuracy they end at."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_optim.diagnostics import divergence

from ..core.figure import panels
from ..core.runs import NOBODY, Watch, run_all
from ..core.store import Result, Store
from ..core.study import Recipe, Sections, Study, Training
from ..core.tables import Cell, Row, Section, Table, estimate, exact, in_order, mean_and_error, spearman
from ..data import Dataset
from ..ensemble import IMAGES, Loops, epoch_orders, set_rate
from ..methods import METHODS
from ..problems.images import ACTIVATIONS, ImageRun, again, network, take, trained

#: Measurements along a run, from before its first step on, and the batches of each.
POINTS, BATCHES = 8, 4
#: What is measured → what tables call it.
QUANTITIES = {"cosine": "cosine with −g", "gain_spread": "spread of the own gain", "interference": "part across g"}
#: A group of runs has this many or no rank correlation.
ENOUGH = 4


def follow(run: ImageRun, data: Dataset, watch: Watch = NOBODY) -> Result:
    """Train a run by plain loops; return divergence by point, means over layers, batches and seeds, and accuracies."""
    trainer, found = Loops(run, data), []
    generator = torch.Generator().manual_seed(1)
    held = [torch.randint(len(data.train_labels), (run.batch_size,), generator=generator) for _ in range(BATCHES)]
    steps = IMAGES.steps(run, data)
    points = [round(point * (steps - 1) / (POINTS - 1)) for point in range(POINTS)]
    batches = chain.from_iterable(order.unbind(1) for order in epoch_orders(run, len(data.train_labels)))
    for taken, index in enumerate(batches):
        set_rate(run, trainer.optimizers, taken / steps)
        if taken in points:
            found.append(_measured(trainer, [take(data, rows) for rows in held]))
        trainer.step(index)
        watch.tick()
    columns = {name: [point[name] for point in found] for name in QUANTITIES}
    about = {"features": data.features, "classes": data.classes}
    return {**about, "steps": points, **columns, "accuracy": trainer.accuracy()}


def _measured(trainer: Loops, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float | None]:
    """Of the step that each seed's optimizer would take on each batch; None where nothing is finite."""
    values: dict[str, list[float]] = defaultdict(list)
    for model, optimizer in zip(trainer.models, trainer.optimizers, strict=True):
        for inputs, labels in batches:
            layers = divergence(model, F.cross_entropy, inputs, labels, optimizer=optimizer).layers.values()
            for summary in (layer.summary() for layer in layers):
                values["cosine"].append(summary["cosine_median"])
                values["interference"].append(summary["interference_median"])
                values["gain_spread"].append(summary["gain_variance"] ** 0.5 / summary["gain_mean"])
    finite = {name: [value for value in values[name] if math.isfinite(value)] for name in QUANTITIES}
    return {name: float(f"{statistics.fmean(each):.6g}") if each else None for name, each in finite.items()}


#: Runs that are followed while they train.
FOLLOWED = IMAGES._replace(
    family=lambda run: run, train=lambda runs, data, watch: [follow(run, data, watch) for run in runs]
)


@dataclass
class MechanismOptions(Training):
    """Options of this study."""

    tuned: Path = Path("runs/digits-tuned.jsonl")
    """a file of tuned runs, whose settings are followed"""
    data: str = "digits"
    """what these runs were trained on"""
    seeds: int = 3
    """how many; seed k is k"""


def _run(options: MechanismOptions, store: Store) -> None:
    """Follow every run that the tuned file shows, at its settings."""
    own = {"data": options.data, "backend": "loop", "seeds": tuple(range(options.seeds))}
    runs = [again(result, **own) for result in Store(options.tuned).read()]
    if not runs:
        raise ValueError(f"--tuned {options.tuned} has no runs to follow; make it by digits-tuned or cifar10-tuned.")
    run_all(runs, FOLLOWED, store, download=options.download)


def means(result: Result) -> dict[str, float]:
    """Every quantity's mean along the run, and the mean accuracy."""
    finite = {name: [value for value in result[name] if value is not None] for name in QUANTITIES}
    along = {name: statistics.fmean(values) if values else math.nan for name, values in finite.items()}
    return {**along, "accuracy": statistics.fmean(result["accuracy"])}


def groups(results: Sequence[Result]) -> dict[str, list[dict[str, float]]]:
    """All runs that have not diverged, and those of every activation and optimizer, where there are enough."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for result in results:
        own, settings = means(result), result["settings"]
        if all(map(math.isfinite, own.values())) and own["accuracy"] > 200 / result["classes"]:
            found["all"].append(own)
            found[f"{settings['activation']}, {settings['optimizer']}"].append(own)
    return {name: members for name, members in found.items() if len(members) >= ENOUGH}


def rank(members: Sequence[dict[str, float]], quantity: str) -> Any:
    """Spearman's rank correlation of a quantity with the accuracy."""
    return spearman([own[quantity] for own in members], [own["accuracy"] for own in members])


def report(store: Store, name: str, folder: Path) -> Sections:
    """Rank correlations, the runs, a figure and a caption."""
    results, found = store.read(), groups(store.read())
    correlations = list[Row]()
    for group, members in found.items():
        ranks = [rank(members, quantity) for quantity in QUANTITIES]
        cells = [Cell(f"{r.statistic:+.2f} ({r.pvalue:.2g})", {"": r.statistic, "p": r.pvalue}) for r in ranks]
        correlations.append([group, exact(len(members)), *cells])
    labels = list(QUANTITIES.values())
    rows = list[Row]()
    for result in sorted(results, key=lambda r: -mean_and_error(r["accuracy"])[0]):
        settings, own = result["settings"], means(result)
        row: Row = [METHODS[settings["method"]].label, settings["activation"], settings["optimizer"]]
        rows.append([*row, estimate(result["accuracy"]), *(exact(own[name], ".3f") for name in QUANTITIES)])
    _figure(results, f"{network(results[0])}: divergence and accuracy", folder / f"{name}.png")
    caption = (
        f"Divergence of the real step, mean over {POINTS} moments of the run, {BATCHES} batches and all layers, and "
        f"its rank correlation with the test accuracy (p). {trained(results)}"
    )
    first = Table(["runs", "n", *(f"accuracy and {label}" for label in labels)], correlations, name="ranks")
    second = Table(["method", "activation", "optimizer", "test accuracy, %", *labels], rows, name="runs")
    return {name: Section([first, second, caption])}


#: Marks of the optimizers.
_MARKS = {"sgd": "o", "momentum": "s", "adam": "^"}


def _figure(results: Sequence[Result], title: str, path: Path) -> None:
    """Draw accuracy against every quantity, a mark per optimizer, filled for tanh."""
    better = [result for result in results if means(result)["accuracy"] > 200 / result["classes"]]
    with panels(list(QUANTITIES.values()), title, path, ylabel="test accuracy, %") as axes:
        for axis, quantity in zip(axes, QUANTITIES, strict=True):
            for result in better:
                own, settings, method = means(result), result["settings"], METHODS[result["settings"]["method"]]
                face = method.color if settings["activation"] == "tanh" else "none"
                look = {"color": method.color, "marker": _MARKS[settings["optimizer"]], "facecolors": face}
                axis.scatter(own[quantity], own["accuracy"], s=45, **look)
        key = partial(axes[0].plot, [], [])  # of colour, mark and filling, one after the other
        for name in in_order(METHODS, (result["settings"]["method"] for result in better)):
            key(color=METHODS[name].color, linewidth=7, label=METHODS[name].label)
        for optimizer in in_order(_MARKS, (result["settings"]["optimizer"] for result in better)):
            key(_MARKS[optimizer], color="0.4", label=optimizer)
        for activation in in_order(ACTIVATIONS, (result["settings"]["activation"] for result in better)):
            filled = activation == "tanh"
            look = {"color": "0.4", "markerfacecolor": "0.4" if filled else "none"}
            key("D", **look, label=f"{activation}: {'filled' if filled else 'hollow'}")


_HELP = "divergence along tuned runs, and whether it ranks them"
#: After what they follow.
_MAKES = [
    Recipe(0.05, "digits-mechanism", ("--tuned {out}/digits-tuned.jsonl",), data=""),
    Recipe(0.6, options=("--tuned {out}/cifar10-tuned.jsonl --seeds 1",), decides=""),
]
STUDIES = {
    "mechanism": Study(_HELP, _run, report, MechanismOptions(), makes=_MAKES, data="images", page="docs/results/mlp.md")
}
