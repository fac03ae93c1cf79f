"""Deep networks of normalisers, linear layers and activations on images: how they train, and their layers' isometry."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from adiv_optim.diagnostics import isometry_strength, record

from ..core.runs import step
from ..core.store import Result, public_name
from ..data import load

BATCH_SIZE, LR = 512, 0.01
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
    measured_on = [next(measuring) for _ in range(MEASURED)]
    # As many samples as features have a singular Gram matrix, and pixels that never change are no features.
    samples = min(samples, data.features // 2, *(3 * width // 4 for width in widths))

    def measured() -> list[dict[str, Any]]:
        paths = [path for path, _ in model.named_children() if path != "out"]
        with torch.no_grad(), record(model, layers=paths, max_samples=samples) as recorder:
            for index in measured_on:
                model(data.train_inputs[index])
        each = zip(*(entry["layers"] for entry in recorder.history), strict=True)
        means = (sum(layer["isometry"] for layer in layers) / MEASURED for layers in each)
        return [{"path": path, "isometry": mean} for path, mean in zip(paths, means, strict=True)]

    start, losses = measured(), list[float]()
    for index in islice(training, steps):
        losses.append(step(model, optimizer, data.train_inputs[index], data.train_labels[index]).item())
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(-1) for part in data.test_inputs.split(BATCH_SIZE)])
    accuracy = 100 * (predicted == data.test_labels).double().mean().item()
    settings = {"data": public_name(name), "activation": activation, "layers": len(widths), "width": widths[0]}
    settings |= {"batch_size": BATCH_SIZE, "lr": LR, "steps": steps, "seed": seed}
    about = {"features": data.features, "training_samples": count, "samples": samples, "batches": MEASURED}
    isometry, strength = {"start": start, "trained": measured()}, isometry_strength(ACTIVATIONS[activation]())
    found = {"strength": strength, "isometry": isometry, "train_loss": losses, "test_accuracy": accuracy}
    return {"settings": settings, **about, **found}
