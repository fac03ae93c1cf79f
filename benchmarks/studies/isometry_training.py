"""Isometry of every layer before and after training, and how fast networks of several activations train."""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim.diagnostics import isometry_strength, record

from ..core.figure import panels, plt
from ..core.progress import measure
from ..core.run import public_name
from ..core.store import Result, Store
from ..core.study import Sections, Study
from ..core.table import markdown
from ..data import DATA, load
from .comparison import DATA_LABELS

LAYERS, WIDTH, BATCH_SIZE, LR = 10, 1000, 512, 0.01
#: Batches that isometry is averaged over, and steps of training over which a loss is.
MEASURED, WINDOW = 2, 20
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "SELU": nn.SELU,
    "tanh": nn.Tanh,
    "leaky ReLU, 0.2": lambda: nn.LeakyReLU(0.2),
    "SiLU": nn.SiLU,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
}


def network(activation: str, features: int, classes: int, width: int) -> nn.Sequential:
    """Ten times norm → linear → activation, then norm and the outputs: weights N(0, 1/fan_in), no norm parameters."""
    model = nn.Sequential()
    for number in range(LAYERS):
        inputs = width if number else features
        model.add_module(f"norm-{number}", nn.LayerNorm(inputs, elementwise_affine=False))
        model.add_module(f"fc-{number}", nn.Linear(inputs, width))
        model.add_module(f"act-{number}", ACTIVATIONS[activation]())
    model.add_module(f"norm-{LAYERS}", nn.LayerNorm(width, elementwise_affine=False))
    model.add_module("out", nn.Linear(width, classes))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
    return model


def _batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of full batches for ever, every sample once an epoch: a sample that came twice would be no isometry."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator)[: count - count % size].split(size)


def train(activation: str, name: str, steps: int, width: int, download: bool = False) -> Result:
    """Train one network with plain SGD; return its loss by step and the isometry of its layers at both ends."""
    data = load(name, download).to("cpu", torch.float32)
    count = len(data.train_labels)
    if count < BATCH_SIZE:
        raise ValueError(f"{name} has {count} training samples, fewer than a batch of {BATCH_SIZE}.")
    torch.manual_seed(0)
    model = network(activation, data.features, data.classes, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches, measuring = (_batches(count, BATCH_SIZE, seed) for seed in (1, 2))
    held = [next(measuring) for _ in range(MEASURED)]
    # As many samples as features have a singular Gram matrix, and pixels that never change are no features.
    samples = min(BATCH_SIZE, data.features // 2)

    def measured() -> list[dict[str, Any]]:
        paths = [path for path, _ in model.named_children() if path != "out"]
        with torch.no_grad(), record(model, layers=paths, max_samples=samples) as recorder:
            for index in held:
                model(data.train_inputs[index])
        each = zip(*(entry["layers"] for entry in recorder.history), strict=True)
        means = (sum(layer["isometry"] for layer in layers) / MEASURED for layers in each)
        return [{"path": path, "isometry": mean} for path, mean in zip(paths, means, strict=True)]

    start, losses = measured(), []
    for index in islice(batches, steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.train_inputs[index]), data.train_labels[index])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(-1) for part in data.test_inputs.split(BATCH_SIZE)])
    accuracy = 100 * (predicted == data.test_labels).double().mean().item()
    settings = {"data": public_name(name), "activation": activation, "layers": LAYERS, "width": width}
    settings |= {"batch_size": BATCH_SIZE, "lr": LR, "steps": steps}
    about = {"features": data.features, "training_samples": count, "samples": samples, "batches": MEASURED}
    isometry, strength = {"start": start, "trained": measured()}, isometry_strength(ACTIVATIONS[activation]())
    found = {"strength": strength, "isometry": isometry, "train_loss": losses, "test_accuracy": accuracy}
    return {"settings": settings, **about, **found}


def report(store: Store, name: str, folder: Path) -> Sections:
    """Figures of isometry by layer and of convergence, table and caption."""
    results = sorted(store.read(), key=lambda r: r["strength"])
    data = DATA_LABELS.get(results[0]["settings"]["data"], results[0]["settings"]["data"])
    layers = next((r for r in results if r["settings"]["activation"] == "tanh"), results[0])
    _layers_figure(layers, data, folder / "isometry-layers.png")
    _convergence_figure(results, data, folder / "isometry-convergence.png")
    return {name: f"{_table(results)}\n\n{_caption(results, data)}"}


def _layers_figure(result: Result, data: str, path: Path) -> None:
    """Isometry of every layer's outputs, a panel before and one after training; the norms' own are shaded."""
    settings = result["settings"]
    stages = {"start": "at initialisation", "trained": f"after {settings['steps']} steps"}
    title = f"Isometry of {result['samples']} samples, layer by layer: {data}, {settings['activation']}"
    looks = {"norm": ("o", "tab:blue", "normalisation"), "fc": ("s", "0.4", "linear")}
    looks["act"] = ("^", "tab:orange", "activation")
    with panels(list(stages.values()), title, path, columns=1, height=2.8) as axes:
        for axis, stage in zip(axes, stages, strict=True):
            found = result["isometry"][stage]
            values = [layer["isometry"] for layer in found]
            axis.plot(range(len(found)), values, color="0.6", linewidth=1, zorder=1)
            for kind, (mark, color, label) in looks.items():
                at = [place for place, layer in enumerate(found) if layer["path"].startswith(kind)]
                axis.plot(at, [values[place] for place in at], mark, color=color, markersize=5, label=label)
                for place in at if kind == "norm" else ():
                    axis.axvspan(place - 1, place, color=color, alpha=0.1, linewidth=0)
            axis.set_xticks(range(len(found)), [layer["path"] for layer in found], rotation=90, fontsize=7)
            axis.set_xlim(-1, len(found) - 0.5)
        axes[0].set_ylim(bottom=0)
        axes[0].set_ylabel("isometry")


def _convergence_figure(results: list[Result], data: str, path: Path) -> None:
    """Training loss by step, and by β at the end of the first epoch and of training."""
    colors, settings, ends = plt.get_cmap("viridis"), results[0]["settings"], _ends(results[0])
    low, high = results[0]["strength"], results[-1]["strength"]
    title = f"Convergence: {data}, {settings['layers']} layers of {settings['width']}, SGD {settings['lr']:g}"
    with panels(["by step", *(f"at the end of {end}, by β" for end in ends)], title, path) as axes:
        for number, result in enumerate(results):
            strength = result["strength"]
            color = colors(0.9 * (strength - low) / max(high - low, 1e-9))
            mark, style = "os^Dv<>"[number % 7], ("-", "--", "-.", ":")[number % 4]
            steps = range(min(WINDOW, settings["steps"]), settings["steps"] + 1)
            curve = [_loss(result, step) for step in steps]
            label = f"{result['settings']['activation']}, β = {strength:.3f}"
            axes[0].plot(steps, curve, style, color=color, label=label, marker=mark, markersize=7, markevery=[-1])
            for axis, step in zip(axes[1:], ends.values(), strict=True):
                axis.plot(strength, _loss(result, step), mark, color=color, markersize=9)
        axes[0].set(xlabel="step", ylabel=f"training loss, mean of {WINDOW} steps")
        for axis in axes[1:]:
            axis.set(xlabel="isometry strength β")
            axis.margins(x=0.2, y=0.1)


def _ends(result: Result) -> dict[str, int]:
    """Where losses are compared: while every sample is new, if that lasts long enough, and in the end."""
    epoch, steps = result["training_samples"] // result["settings"]["batch_size"], result["settings"]["steps"]
    return {"epoch 1": epoch, "training": steps} if WINDOW <= epoch < steps else {"training": steps}


def _loss(result: Result, step: int) -> float:
    return statistics.fmean(result["train_loss"][max(0, step - WINDOW) : step])


def _table(results: list[Result]) -> str:
    rows, ends = [], _ends(results[0])
    for result in results:
        stages = [[layer["isometry"] for layer in result["isometry"][stage]] for stage in ("start", "trained")]
        # Layers come in threes, norm, linear, activation, and end with a norm.
        gains = [min(after - before for before, after in zip(s[2::3], s[3::3], strict=True)) for s in stages]
        cells = [*(f"{s[0]:.3f}, {s[-1]:.3f}" for s in stages), ", ".join(f"{gain:+.1g}" for gain in gains)]
        cells += [*(f"{_loss(result, step):.3f}" for step in ends.values()), f"{result['test_accuracy']:.1f}"]
        rows.append([result["settings"]["activation"], f"{result['strength']:.4f}", *cells])
    header = ["activation", "β", "isometry after the first and the last norm", "trained"]
    header += ["least gain by a norm, trained", *(f"loss, end of {end}" for end in ends), "test accuracy, %"]
    return markdown(header, rows)


def _caption(results: list[Result], data: str) -> str:
    settings, result = results[0]["settings"], results[0]
    epochs = settings["steps"] * settings["batch_size"] / result["training_samples"]
    correlations = ""
    if len(results) > 2:

        def ranks(values: list[float]) -> list[int]:
            return [sorted(values).index(value) for value in values]

        strengths = [r["strength"] for r in results]
        ends = _ends(result).items()
        columns = {f"the loss at the end of {end}": [_loss(r, step) for r in results] for end, step in ends}
        columns["test accuracy"] = [r["test_accuracy"] for r in results]
        found = (
            f"{name} {statistics.correlation(*map(ranks, (strengths, column))):+.2f}"
            for name, column in columns.items()
        )
        correlations = f"Rank correlation of β over {len(results)} activations with {', with '.join(found)}. "
    return (
        f"{data}, {settings['layers']} layers of {settings['width']}, LayerNorm without parameters → linear → "
        f"activation, weights N(0, 1/fan_in), SGD {settings['lr']:g}, {settings['steps']} steps of "
        f"{settings['batch_size']} ({epochs:.1f} epochs), one seed. Isometry, at initialisation and trained, is that "
        f"of {result['samples']} training samples, mean of {result['batches']} batches; a norm centres before it "
        f"normalises, and that may lower it. Training losses are means of {WINDOW} steps. {correlations}"
        f"torch {result['environment']['torch']}."
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default="digits", help=f"{', '.join(DATA)}; imagefolder as imagefolder:PATH")
    parser.add_argument("--download", action="store_true", help="let torchvision fetch CIFAR-10 into ./data")
    parser.add_argument("--activations", nargs="+", default=list(ACTIVATIONS), metavar="NAME", help="of the networks")
    parser.add_argument("--steps", type=int, default=200, help="of batches of 512")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the hidden layers")


def _run(options: argparse.Namespace, store: Store) -> None:
    if unknown := set(options.activations) - set(ACTIVATIONS):
        raise ValueError(f"unknown activation {min(unknown)!r}; known are {', '.join(ACTIVATIONS)}.")
    for name in ("steps", "width"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; it must be positive.")
    where = f"{public_name(options.data)}, {options.steps} steps, width {options.width}"
    given = {"steps": options.steps, "width": options.width, "download": options.download}
    measure(store, {f"{name}, {where}": partial(train, name, options.data, **given) for name in options.activations})


STUDIES = {"isometry-training": Study("isometry of trained networks, layer by layer", _run, report, _arguments)}
