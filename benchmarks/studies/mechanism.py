"""Does less divergence train better: the divergence of real steps along tuned runs, beside the accuracy they end at."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns
import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_optim.diagnostics import divergence

from ..core.figure import panels, seaborn
from ..core.runs import NOBODY, Watch, run_all
from ..core.store import Result, Store
from ..core.study import Recipe, Sections, Study, Training
from ..core.tables import Cell, Row, Section, Table, estimate, exact, in_order, spearman
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
            watch.note(taken, {name: [value] for name, value in found[-1].items()})
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

    tuned: Path = Path("runs/digits-tuned.jsonl")  # a file of tuned runs, whose settings are followed
    data: str = "digits"  # what these runs were trained on
    seeds: int = 3  # how many; seed k is k


def _run(options: MechanismOptions, store: Store) -> None:
    """Follow every run that the tuned file shows, at its settings."""
    own = {"data": options.data, "backend": "loop", "seeds": tuple(range(options.seeds))}
    runs = [again(result, **own) for result in Store(options.tuned).read()]
    if not runs:
        raise ValueError(f"--tuned {options.tuned} has no runs to follow; make it by digits-tuned or cifar10-tuned.")
    run_all(runs, FOLLOWED, store, download=options.download)


def runs_of(results: Sequence[Result]) -> pd.DataFrame:
    """A row for each run: method, activation, optimizer, accuracies and their mean, and every quantity's mean."""
    rows = []
    for result in results:
        row = {name: result["settings"][name] for name in ("method", "activation", "optimizer")}
        row |= {"accuracies": result["accuracy"], "accuracy": statistics.fmean(result["accuracy"])}
        for name in QUANTITIES:
            finite = [value for value in result[name] if value is not None]
            row[name] = statistics.fmean(finite) if finite else math.nan
        rows.append({**row, "method": METHODS[row["method"]].label})
    return pd.DataFrame(rows)


def sound(results: Sequence[Result]) -> pd.DataFrame:
    """The runs that have not diverged: with divergence that is finite, and twice as accurate as guessing."""
    runs = runs_of(results).dropna(subset=[*QUANTITIES])
    return runs[runs["accuracy"] > 200 / results[0]["classes"]]


def groups(results: Sequence[Result]) -> dict[str, pd.DataFrame]:
    """All sound runs, and those of every activation and optimizer, where there are enough."""
    runs = sound(results)
    by_both = {", ".join(key): group for key, group in runs.groupby(["activation", "optimizer"], sort=False)}
    return {name: group for name, group in {"all": runs, **by_both}.items() if len(group) >= ENOUGH}


def rank(runs: pd.DataFrame, quantity: str) -> Any:
    """Spearman's rank correlation of a quantity with the accuracy."""
    return spearman(runs[quantity], runs["accuracy"])


def report(store: Store, name: str, folder: Path) -> Sections:
    """Rank correlations, the runs, a figure and a caption."""
    results = store.read()
    named, correlations = list(QUANTITIES.values()), list[Row]()
    for group, members in groups(results).items():
        ranks = [rank(members, quantity) for quantity in QUANTITIES]
        cells = [Cell(f"{r.statistic:+.2f} ({r.pvalue:.2g})", {"": r.statistic, "p": r.pvalue}) for r in ranks]
        correlations.append([group, exact(len(members)), *cells])
    ordered = runs_of(results).sort_values("accuracy", ascending=False, kind="stable")
    rows = [
        [run["method"], run["activation"], run["optimizer"], estimate(run["accuracies"]),
         *(exact(run[quantity], ".3f") for quantity in QUANTITIES)] for _, run in ordered.iterrows()
    ]  # fmt: skip
    if len(better := sound(results)):
        _figure(better, f"{network(results[0])}: divergence and accuracy", folder / f"{name}.png")
    caption = f"Divergence of the real step, and its rank correlation with the test accuracy (p). {trained(results)}"
    first = Table(["runs", "n", *(f"accuracy and {label}" for label in named)], correlations, name="ranks")
    second = Table(["method", "activation", "optimizer", "test accuracy, %", *named], rows, name="runs")
    return {name: Section([first, second, caption])}


#: Marks of the optimizers.
_MARKS = {"sgd": "o", "momentum": "s", "adam": "^"}


def _figure(runs: pd.DataFrame, title: str, path: Path) -> None:
    """Draw accuracy against every quantity, a row of panels for each activation and a mark for each optimizer."""
    places = list(product(in_order(ACTIVATIONS, runs["activation"]), QUANTITIES))
    look = {"hue": "method", "palette": {method.label: method.color for method in METHODS.values()}, "s": 45}
    look |= {"style": "optimizer", "markers": _MARKS, "style_order": in_order(_MARKS, runs["optimizer"])}
    names = [f"{QUANTITIES[quantity]}: {activation}" for activation, quantity in places]
    with panels(names, title, path, columns=3, ylabel="test accuracy, %") as axes:
        for axis, (activation, quantity) in zip(axes, places, strict=True):
            seaborn(sns.scatterplot, axis, runs[runs["activation"] == activation], x=quantity, y="accuracy", **look)


STUDIES = {
    "mechanism": Study(
        "divergence along tuned runs, and whether it ranks them", _run, report, MechanismOptions(),
        makes=[  # after what they follow
            Recipe(0.05, "digits-mechanism", ("--tuned {out}/digits-tuned.jsonl",), data=""),
            Recipe(0.6, options=("--tuned {out}/cifar10-tuned.jsonl --seeds 1",), decides=""),
        ], data="images", page="docs/results/mlp.md",
    )
}  # fmt: skip
