"""Isometry of every layer before and after training, and how fast networks of several activations train."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim.diagnostics import isometry_strength, record

from ..data import Dataset
from ..runs import environment

LAYERS, WIDTH, BATCH_SIZE, LR = 10, 1000, 512, 0.01
#: Batches that isometry is averaged over.
MEASURED = 2
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
    layers: list[tuple[str, nn.Module]] = []
    for number in range(LAYERS):
        inputs = width if number else features
        layers += [
            (f"norm-{number}", nn.LayerNorm(inputs, elementwise_affine=False)),
            (f"fc-{number}", nn.Linear(inputs, width)),
            (f"act-{number}", ACTIVATIONS[activation]()),
        ]
    layers.append((f"norm-{LAYERS}", nn.LayerNorm(width, elementwise_affine=False)))
    layers.append(("out", nn.Linear(width, classes)))
    model = nn.Sequential(OrderedDict(layers))
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


def run(
    activation: str, data: Dataset, name: str, steps: int, width: int, tick: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Train one network with plain SGD; return its loss by step and the isometry of its layers at both ends.

    Args:
        activation: a key of `ACTIVATIONS`.
        data: float32, on the CPU.
        name: of the data set, for the result.
        steps: of batches of 512 (or all there is), reshuffled every epoch.
        width: of the hidden layers.
        tick: called after every step.
    """
    torch.manual_seed(0)
    model = network(activation, data.features, data.classes, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    size = min(BATCH_SIZE, len(data.train_labels))
    batches, measuring = _batches(len(data.train_labels), size, seed=1), _batches(len(data.train_labels), size, seed=2)
    held = [next(measuring) for _ in range(MEASURED)]
    # As many samples as features have a singular Gram matrix, and pixels that never change are no features.
    samples = min(size, data.features // 2)

    def measured() -> list[dict[str, Any]]:
        paths = [path for path, _ in model.named_children() if path != "out"]
        with torch.no_grad(), record(model, layers=paths, max_samples=samples) as recorder:
            for index in held:
                model(data.train_inputs[index])
        passes = [entry["layers"] for entry in recorder.history]
        return [
            {"path": path, "isometry": sum(layers[at]["isometry"] for layers in passes) / MEASURED}
            for at, path in enumerate(paths)
        ]

    start, losses = measured(), []
    for index in islice(batches, steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.train_inputs[index]), data.train_labels[index])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tick()
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(-1) for part in data.test_inputs.split(size)])
    return {
        "kind": "isometry-training",
        "name": "isometry-training",
        "settings": {
            "data": name,
            "activation": activation,
            "layers": LAYERS,
            "width": width,
            "batch_size": size,
            "lr": LR,
            "steps": steps,
        },
        "features": data.features,
        "training_samples": len(data.train_labels),
        "samples": samples,
        "batches": MEASURED,
        "strength": isometry_strength(ACTIVATIONS[activation]()),
        "isometry": {"start": start, "trained": measured()},
        "train_loss": losses,
        "test_accuracy": 100 * (predicted == data.test_labels).double().mean().item(),
        "environment": environment(),
    }
