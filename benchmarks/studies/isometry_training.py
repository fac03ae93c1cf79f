"""Isometry of every layer before and after training, for several widths too, and how fast networks train by depth.

Networks are normalisers, linear layers and activations in turn.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adiv_optim.diagnostics import isometry, isometry_strength

from ..core.runs import check_known, measure, step
from ..core.store import Result, Store, public_name, setting
from ..core.study import Options, Recipe, Sections, Study, apart, protocols
from ..core.tables import Cell, Row, Section, Table, estimate, exact, grouped, machine, spearman
from ..data import load
from ..problems.images import data_label

BATCH_SIZE, LR = 512, 0.01
#: Batches that isometry is averaged over.
MEASURED = 2
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid, "SELU": nn.SELU, "tanh": nn.Tanh, "leaky ReLU, 0.2": partial(nn.LeakyReLU, 0.2),
    "SiLU": nn.SiLU, "ReLU": nn.ReLU, "GELU": nn.GELU,
}  # fmt: skip


def network(activation: str, features: int, classes: int, widths: Sequence[int]) -> nn.Sequential:
    """Norm → linear → activation for every width, then norm and outputs: weights N(0, 1/fan_in), norms without any."""
    model = nn.Sequential()
    for number, (inputs, width) in enumerate(pairwise([features, *widths])):
        model.add_module(f"norm-{number}", nn.LayerNorm(inputs, elementwise_affine=False))
        model.add_module(f"fc-{number}", nn.Linear(inputs, width))
        model.add_module(f"act-{number}", ACTIVATIONS[activation]())
    model.add_module(f"norm-{len(widths)}", nn.LayerNorm(widths[-1], elementwise_affine=False))
    model.add_module("out", nn.Linear(widths[-1], classes))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
    return model


def batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of full batches for ever, every sample once an epoch: a sample that came twice would be no isometry."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator)[: count - count % size].split(size)


def train(
    activation: str, name: str, steps: int, widths: Sequence[int], seed: int = 0, *,
    samples: int = BATCH_SIZE, download: bool = False,
) -> Result:  # fmt: skip
    """Train one network with plain SGD; return its loss by step and the isometry of its layers at both ends."""
    data = load(name, download).to("cpu", torch.float32)
    count = len(data.train_labels)
    if count < BATCH_SIZE:
        raise ValueError(f"{name} has {count} training samples, fewer than a batch of {BATCH_SIZE}.")
    torch.manual_seed(seed)
    model = network(activation, data.features, data.classes, widths)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    training, measuring = (batches(count, BATCH_SIZE, 2 * seed + part) for part in (1, 2))
    measured_on = list(islice(measuring, MEASURED))
    # As many samples as features have a singular Gram matrix, and pixels that never change are no features.
    samples = min(samples, data.features // 2, *(3 * width // 4 for width in widths))
    thinned = torch.arange(samples) * BATCH_SIZE // samples
    *watched, _ = model.named_children()  # all but the outputs

    @torch.no_grad()
    def measured() -> list[dict[str, Any]]:
        isometries = defaultdict[str, list[float]](list)
        for index in measured_on:
            outputs = data.train_inputs[index]
            for path, layer in watched:
                outputs = layer(outputs)
                rows = outputs[thinned].double()
                isometries[path].append(isometry(rows @ rows.mT).item())
        return [{"path": path, "isometry": statistics.fmean(values)} for path, values in isometries.items()]

    start, losses = measured(), list[float]()
    for index in islice(training, steps):
        losses.append(step(model, optimizer, data.train_inputs[index], data.train_labels[index]).item())
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(-1) for part in data.test_inputs.split(BATCH_SIZE)])
    accuracy = 100 * (predicted == data.test_labels).double().mean().item()
    settings = {"data": public_name(name), "activation": activation, "layers": len(widths), "width": widths[0]}
    settings |= {"batch_size": BATCH_SIZE, "lr": LR, "steps": steps, "seed": seed}
    return {
        "settings": settings, "features": data.features, "training_samples": count, "samples": samples,
        "batches": MEASURED, "strength": isometry_strength(ACTIVATIONS[activation]()),
        "isometry": {"start": start, "trained": measured()}, "train_loss": losses, "test_accuracy": accuracy,
    }  # fmt: skip


#: Steps of training over which a loss is averaged.
WINDOW = 20
#: When isometry is measured.
STAGES = ("start", "trained")
#: Activation → the results of every seed, by isometry strength.
Seeds = dict[str, list[Result]]


def by_depth(results: Sequence[Result]) -> dict[int, Seeds]:
    """Sort results by how many layers there are."""
    depths = grouped(sorted(results, key=lambda r: (r["settings"]["layers"], r["strength"])), setting("layers"))
    return {layers: grouped(found, setting("activation")) for layers, found in depths.items()}


def report(store: Store, name: str, folder: Path) -> Sections:
    """A table for every protocol and depth."""
    sections = Sections()
    for own, group, _ in protocols(store, name, "activation", "layers", "seed"):
        for number, (layers, found) in enumerate(by_depth(group).items()):
            first, end = next(iter(found.values()))[0], own.removeprefix(name) + f"-{layers}" * (number > 0)
            data = data_label(first["settings"]["data"])
            caption = f"{data}, {layers} layers, {first['settings']['steps']} steps. {machine(first['environment'])}"
            sections[f"{name}{end}"] = Section([_table(found), caption])
    return sections


def _losses(seeds: list[Result]) -> list[float]:
    return [statistics.fmean(result["train_loss"][-WINDOW:]) for result in seeds]


def least_gains(seeds: list[Result], stage: str) -> list[float]:
    """How much isometry the norm gains that gains least, of every seed."""
    # Layers come in threes, norm, linear, activation, and end with a norm.
    layers = [[layer["isometry"] for layer in result["isometry"][stage]] for result in seeds]
    return [min(after - before for before, after in zip(s[2::3], s[3::3], strict=True)) for s in layers]


def _table(found: Seeds) -> Table:
    rows = list[Row]()
    for activation, seeds in found.items():
        cells = []
        for stage in STAGES:
            first, last = (statistics.fmean(r["isometry"][stage][at]["isometry"] for r in seeds) for at in (0, -1))
            cells.append(Cell(f"{first:.3f}, {last:.3f}", {"first": first, "last": last}))
        start, trained = (min(least_gains(seeds, stage)) for stage in STAGES)
        cells.append(Cell(f"{start:+.1g}, {trained:+.1g}", {"at initialisation": start, "at the end": trained}))
        cells.append(estimate(_losses(seeds), 3))
        cells.append(estimate([r["test_accuracy"] for r in seeds], 1))
        rows.append([activation, exact(seeds[0]["strength"], ".4f"), *cells])
    header = ["activation", "β", "isometry after the first and the last norm", "trained"]
    header += ["least gain by a norm, trained", "loss, end of training", "test accuracy, %"]
    return Table(header, rows)


def correlation(found: Seeds) -> Any:
    """Spearman's rank correlation of β with the loss at the end of training, of means over seeds."""
    losses = [statistics.fmean(_losses(seeds)) for seeds in found.values()]
    return spearman([seeds[0]["strength"] for seeds in found.values()], losses)


@dataclass
class WidthsOptions(Options):
    """Options of both studies."""

    data: str = "cifar10"  # digits, cifar10 or imagefolder:PATH
    download: bool = False  # let torchvision fetch CIFAR-10 into ./data


@dataclass
class TrainingOptions(WidthsOptions):
    """Options of isometry-training: the paper has nine epochs, "shallow" networks of ten layers or less, and deeper."""

    activations: tuple[str, ...] = tuple(ACTIVATIONS)  # of the networks
    layers: tuple[int, ...] = (10, 20)  # hidden layers
    seeds: int = 3  # how many; seed k is k
    steps: int = 873  # of batches of 512
    width: int = 1000  # of the hidden layers


def _run(options: TrainingOptions, store: Store) -> None:
    check_known("activation", options.activations, ACTIVATIONS)
    data, steps, width = options.data, options.steps, options.width
    for layers, seed, name in product(options.layers, range(options.seeds), options.activations):
        which = f", {layers} layers, seed {seed}" * ((layers, seed) != (10, 0))
        run = partial(train, name, data, steps, [width] * layers, seed, download=options.download)
        measure(store, {f"{name}, {public_name(data)}, {steps} steps, width {width}{which}": run})


WIDTHS = [[1000] * 5, [512, 1024, 2048, 4096, 8192], [8192, 4096, 2048, 1024, 512], [1024, 2048, 1024, 2048, 1024]]


def _run_widths(options: WidthsOptions, store: Store) -> None:
    def measured(widths: list[int]) -> Result:
        return {"widths": widths, **train("tanh", options.data, 0, widths, samples=256, download=options.download)}

    measure(store, {f"{widths}, {public_name(options.data)}": partial(measured, widths) for widths in WIDTHS})


def _widths(results: list[Result], name: str, folder: Path) -> Section:
    """Gap behind every norm, a row for each choice of widths."""
    rows = list[Row]()
    for result in results:
        norms = [layer["isometry"] for layer in result["isometry"]["start"] if layer["path"].startswith("norm")]
        rows.append([", ".join(map(str, result["widths"])), *(exact(-math.log(isometry), ".3f") for isometry in norms)])
    header = ["widths", *(f"norm {number}" for number in range(len(rows[0]) - 1))]
    return Section([Table(header, rows), "Isometry gap behind every norm, at initialisation."])


_PAGE = "docs/results/isometry.md"
STUDIES = {
    "isometry-training": Study(
        "isometry of trained networks, layer by layer, and convergence: Figs. 2, 7, B.6", _run, report,
        TrainingOptions(), makes=[Recipe(1.2, options=("--seeds 1 --steps 194",))],
        data="images", page=_PAGE, smoke="--data digits --activations tanh --layers 2 --seeds 1 --steps 2 --width 8",
    ),
    "isometry-widths": Study(
        "isometry by layer for several widths, Fig. B.4", _run_widths, apart(_widths, "width"), WidthsOptions(),
        makes=[Recipe(0.02)], data="images", page=_PAGE,
    ),
}  # fmt: skip
