"""Isometry of every layer before and after training, for several widths too, and how fast networks train by depth."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import seaborn as sns

from ..core.figures import WIDTH, facets, finished
from ..core.options import Options
from ..core.runs import measure
from ..core.store import Result, Store, public_name, setting
from ..core.study import Recipe, Sections, Study, apart, protocols
from ..core.tables import Section, Table, estimate, grouped, spearman, spread
from ..problems.images import data_label
from ..problems.isometry import ACTIVATIONS, train

#: Steps of training over which a loss is averaged.
WINDOW = 20
#: When isometry is measured.
STAGES = ("start", "trained")
#: Activation → the results of every seed, by isometry strength.
Seeds = dict[str, list[Result]]


def by_depth(results: Sequence[Result]) -> dict[int, Seeds]:
    """Sort results by how many layers there are."""
    depths = grouped(sorted(results, key=lambda r: (r["settings"]["layers"], r["strength"])), setting("layers"))
    return {layers: grouped(results, setting("activation")) for layers, results in depths.items()}


def report(store: Store, name: str, folder: Path) -> Sections:
    """For every protocol and depth the figures of isometry by layer and of convergence, table and caption."""
    sections = Sections()
    for own, group, _ in protocols(store, name, "activation", "layers", "seed"):
        for number, (layers, runs) in enumerate(by_depth(group).items()):
            first, end = next(iter(runs.values()))[0], own.removeprefix(name) + f"-{layers}" * (number > 0)
            data = data_label(first["settings"]["data"])
            _layers_figure(runs.get("tanh", [first])[0], data, folder / f"isometry-layers{end}.png")
            _convergence_figure(runs, data, folder / f"isometry-convergence{end}.png")
            sections[f"{name}{end}"] = Section([_table(runs), _caption(runs, data)])
    return sections


#: Kinds of layers by the beginnings of their names: label, mark, colour.
_KINDS = {
    "norm": ("normalisation", "o", "tab:blue"),
    "fc": ("linear", "s", "0.4"),
    "act": ("activation", "^", "tab:orange"),
}


def _layers_figure(result: Result, data: str, path: Path) -> None:
    """Isometry of every layer's outputs, a panel before and one after training; the norms' own are shaded."""
    settings = result["settings"]
    names = ["at initialisation", f"after {settings['steps']} steps"]
    frame = pd.DataFrame([
        {"stage": name, "layer": place, "path": layer["path"], "isometry": layer["isometry"],
         "kind": _KINDS[layer["path"].split("-")[0]][0]}
        for name, layers in zip(names, result["isometry"].values(), strict=True) for place, layer in enumerate(layers)
    ])  # fmt: skip
    grid = sns.relplot(
        frame, x="layer", y="isometry", hue="kind", style="kind", row="stage", height=2.8, aspect=WIDTH / 2.8,
        palette={label: color for label, _, color in _KINDS.values()},
        markers={label: mark for label, mark, _ in _KINDS.values()},
    )  # fmt: skip
    for stage, axis in grid.axes_dict.items():
        shown = frame[frame["stage"] == stage]
        axis.plot(shown["layer"], shown["isometry"], color="0.6", linewidth=1, zorder=0)
        for place in shown["layer"][shown["path"].str.startswith("norm")]:
            axis.axvspan(place - 1, place, color="tab:blue", alpha=0.1, linewidth=0)
        axis.set_xticks(shown["layer"], shown["path"], rotation=90, fontsize=7)
    title = f"Isometry of {result['samples']} samples, layer by layer: {data}, {settings['activation']}"
    look = {"xlim": (-1, frame["layer"].max() + 0.5), "ylim": (0, None), "xlabel": ""}
    finished(grid, title, path, titles="{row_name}", ylabel="isometry", **look)


def _convergence_figure(runs: Seeds, data: str, path: Path) -> None:
    """Training loss by step, and by β at the end of the first epoch and of training; means over seeds."""
    first, *_ = (seeds[0] for seeds in runs.values())
    settings, ends, points, curves = first["settings"], _ends(runs), [], []
    strengths = {activation: seeds[0]["strength"] for activation, seeds in runs.items()}
    labels = {activation: f"{activation}, β = {strength:.3f}" for activation, strength in strengths.items()}
    for activation, seeds in runs.items():
        for number in range(min(WINDOW, settings["steps"]), settings["steps"] + 1):
            curves.append((labels[activation], number, statistics.fmean(_losses(seeds, number))))
        points.append(("by step", *curves[-1]))
        for end, number in ends.items():
            loss = statistics.fmean(_losses(seeds, number))
            points.append((f"at the end of {end}, by β", labels[activation], strengths[activation], loss))
    low, high = min(strengths.values()), max(strengths.values())
    shades = [0.9 * (strength - low) / max(high - low, 1e-9) for strength in strengths.values()]
    look: dict[str, Any] = {"x": "x", "y": "loss", "hue": "activation", "style": "activation"}
    look |= {"palette": dict(zip(labels.values(), map(matplotlib.colormaps["viridis"], shades), strict=True))}
    grid = sns.relplot(
        pd.DataFrame(points, columns=["panel", "activation", "x", "loss"]), **look, s=80, col="panel",
        markers=dict(zip(labels.values(), "os^Dv<>", strict=False)), facet_kws={"sharex": False},
        **facets(1 + len(ends)),
    )  # fmt: skip
    axis, *others = grid.axes.flat
    sns.lineplot(pd.DataFrame(curves, columns=["activation", "x", "loss"]), **look, legend=False, ax=axis)
    for other in others:
        other.margins(x=0.2, y=0.1)
        other.set_xlabel("isometry strength β")
    axis.set_xlabel("step")
    title = f"Convergence: {data}, {settings['layers']} layers of {settings['width']}, SGD {settings['lr']:g}"
    finished(grid, title, path, ylabel=f"training loss, mean of {WINDOW} steps")


def _ends(runs: Seeds) -> dict[str, int]:
    """Where losses are compared: while every sample is new, if that lasts long enough, and in the end."""
    result = next(iter(runs.values()))[0]
    epoch, steps = result["training_samples"] // result["settings"]["batch_size"], result["settings"]["steps"]
    return {"epoch 1": epoch, "training": steps} if WINDOW <= epoch < steps else {"training": steps}


def _losses(seeds: list[Result], step: int) -> list[float]:
    return [statistics.fmean(result["train_loss"][max(0, step - WINDOW) : step]) for result in seeds]


def least_gains(seeds: list[Result], stage: str) -> list[float]:
    """How much isometry the norm gains that gains least, of every seed."""
    # Layers come in threes, norm, linear, activation, and end with a norm.
    layers = [[layer["isometry"] for layer in result["isometry"][stage]] for result in seeds]
    return [min(after - before for before, after in zip(s[2::3], s[3::3], strict=True)) for s in layers]


#: Of the least gain by a norm.
_GAINS = {"start": "at initialisation", "trained": "at the end"}


def _table(runs: Seeds) -> Table:
    records, ends = [], _ends(runs)
    headers = {"start": "isometry after the first and the last norm", "trained": "trained"}
    gain, losses = "least gain by a norm, trained", {f"loss, end of {end}": step for end, step in ends.items()}
    for activation, seeds in runs.items():
        record = {"activation": activation, "β": seeds[0]["strength"]}
        for stage, header in headers.items():
            for name, at in (("first", 0), ("last", -1)):
                record[f"{header} {name}"] = statistics.fmean(r["isometry"][stage][at]["isometry"] for r in seeds)
        record |= {f"{gain} {name}": min(least_gains(seeds, stage)) for stage, name in _GAINS.items()}
        for header, at in losses.items():
            record |= spread(header, _losses(seeds, at))
        records.append(record | spread("test accuracy, %", [r["test_accuracy"] for r in seeds]))
    return Table.of(records, {
        "activation": "{activation}", "β": "{β:.4f}",
        **{header: f"{{{header} first:.3f}}, {{{header} last:.3f}}" for header in headers.values()},
        gain: ", ".join(f"{{{gain} {name}:+.1g}}" for name in _GAINS.values()),
        **{header: estimate(header, 3) for header in losses}, "test accuracy, %": estimate("test accuracy, %", 1),
    })  # fmt: skip


def correlations(runs: Seeds) -> dict[str, Any]:
    """Spearman's rank correlation of β with each end's loss and with the test accuracy, of means over seeds."""
    strengths = [seeds[0]["strength"] for seeds in runs.values()]
    columns = {
        f"the loss at the end of {end}": [statistics.fmean(_losses(seeds, step)) for seeds in runs.values()]
        for end, step in _ends(runs).items()
    }
    columns["test accuracy"] = [statistics.fmean(r["test_accuracy"] for r in seeds) for seeds in runs.values()]
    return {name: spearman(strengths, column) for name, column in columns.items()}


def _caption(runs: Seeds, data: str) -> str:
    counts, result = {len(seeds) for seeds in runs.values()}, next(iter(runs.values()))[0]
    settings = result["settings"]
    epochs = settings["steps"] * settings["batch_size"] / result["training_samples"]
    ranks = ""
    if len(runs) > 2:
        each = (f"{name} {rank.statistic:+.2f} (p = {rank.pvalue:.2g})" for name, rank in correlations(runs).items())
        ranks = f"Rank correlation of β over {len(runs)} activations with {', with '.join(each)}. "
    return (
        f"{data}, {settings['layers']} layers of {settings['width']}, LayerNorm without parameters → linear → "
        f"activation, weights N(0, 1/fan_in), SGD {settings['lr']:g}, {settings['steps']} steps of "
        f"{settings['batch_size']} ({epochs:.1f} epochs), {' or '.join(map(str, sorted(counts)))} seed(s). Isometry, "
        f"at initialisation and trained, is that of {result['samples']} training samples, mean of {result['batches']} "
        "batches; a norm centres before it normalises, and that may lower it. Training losses are means of "
        f"{WINDOW} steps. {ranks}torch {result['environment']['torch']}."
    )


@dataclass
class WidthsOptions(Options):
    """Options of both studies."""

    data: str = "cifar10"
    """images: digits, cifar10, imagefolder:PATH or fake"""
    download: bool = False
    """let torchvision fetch CIFAR-10 into ./data"""


@dataclass
class IsometryOptions(WidthsOptions):
    """Options of the networks that train. The paper has nine epochs, and calls ten layers or less shallow."""

    activations: tuple[str, ...] = tuple(ACTIVATIONS)
    """of the networks"""
    layers: tuple[int, ...] = (10, 20)
    """hidden layers"""
    seeds: int = 3
    """how many; seed k is k"""
    steps: int = 873
    """of batches of 512"""
    width: int = 1000
    """of the hidden layers"""


def _run(options: IsometryOptions, store: Store) -> None:
    if unknown := set(options.activations) - set(ACTIVATIONS):
        raise ValueError(f"unknown activation {min(unknown)!r}; known are {', '.join(ACTIVATIONS)}.")
    data, steps, width = options.data, options.steps, options.width
    wanted: dict[str, Callable[[], Result]] = {}
    for layers, seed, name in product(options.layers, range(options.seeds), options.activations):
        which = f", {layers} layers, seed {seed}" * ((layers, seed) != (10, 0))
        run = partial(train, name, data, steps, [width] * layers, seed, download=options.download)
        wanted[f"{name}, {public_name(data)}, {steps} steps, width {width}{which}"] = run
    measure(store, wanted)


WIDTHS = [[1000] * 5, [512, 1024, 2048, 4096, 8192], [8192, 4096, 2048, 1024, 512], [1024, 2048, 1024, 2048, 1024]]


def _run_widths(options: WidthsOptions, store: Store) -> None:
    def measured(widths: list[int]) -> Result:
        return {"widths": widths, **train("tanh", options.data, 0, widths, samples=256, download=options.download)}

    measure(store, {f"{widths}, {public_name(options.data)}": partial(measured, widths) for widths in WIDTHS})


def _widths(results: list[Result], name: str, folder: Path) -> Section:
    """Gap behind every norm, a row for each choice of widths."""
    records, columns = [], {"widths": "{widths}"}
    for result in results:
        norms = [layer["isometry"] for layer in result["isometry"]["start"] if layer["path"].startswith("norm")]
        gaps = {f"norm {number}": -math.log(isometry) for number, isometry in enumerate(norms)}
        records.append({"widths": ", ".join(map(str, result["widths"])), **gaps})
        columns |= {norm: f"{{{norm}:.3f}}" for norm in gaps}
    caption = (
        f"{data_label(results[0]['settings']['data'])}, tanh, at initialisation: isometry gap of "
        f"{results[0]['samples']} samples behind every norm, one seed (Fig. B.4). "
        f"torch {results[0]['environment']['torch']}."
    )
    return Section([Table.of(records, columns), caption])


_PAGE = "docs/results/isometry.md"
STUDIES = {
    "isometry-training": Study(
        "isometry of trained networks, layer by layer, and convergence: Figs. 2, 7, B.6", _run, report,
        IsometryOptions(), makes=[Recipe(1.2, options=("--seeds 1 --steps 194",))],
        data="images", page=_PAGE, smoke="--data digits --activations tanh --layers 2 --seeds 1 --steps 2 --width 8",
    ),
    "isometry-widths": Study(
        "isometry by layer for several widths, Fig. B.4", _run_widths, apart(_widths, "width"), WidthsOptions(),
        makes=[Recipe(0.02)], data="images", page=_PAGE,
    ),
}  # fmt: skip
