"""Random trainings of random networks, each by its seed."""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from tests.fuzz.networks import LAYERS, WORDS, Network, random_network
from tests.helpers.seeds import manual_seed


@dataclass(frozen=True)
class Training:
    """What is done with a network."""

    inputs: list[Tensor]
    targets: list[Tensor]
    parts: int  # into how many micro-batches each batch is split
    wasted: bool  # whether each step is preceded by a backward that zero_grad() drops, and an evaluation
    groups: list[list[str]]  # the names of the parameters of each of the optimizer's groups
    rates: list[tuple[float, float]]  # the learning rate and weight decay of each
    build: Callable[[Any], Optimizer]
    late: bool = False  # whether the last group is added after the first step
    count: tuple[int, torch.Size] | None = None  # a layer, and the shape of what is counted of it by hand

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The bare optimizer of what it is to hold of a model at first."""
        groups = self._groups(model)
        return self.build(groups[:-1] if self.late else groups)

    def grow(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Add the last group."""
        optimizer.add_param_group(self._groups(model)[-1])
        for parameter, state in self.build(self._groups(model)[-1:]).state.items():
            optimizer.state.setdefault(parameter, state)  # Adagrad of torch 2.9 has it from its own construction alone

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        return [
            {"params": [named[name] for name in names], "lr": rate, "weight_decay": decay}
            for names, (rate, decay) in zip(self.groups, self.rates, strict=True)
        ]

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """The micro-batches of one step; targets of the whole batch's scale."""
        return list(zip(self.inputs[step].chunk(self.parts), self.targets[step].chunk(self.parts), strict=True))

    def counted(self, model: Network, step: int) -> tuple[nn.Module, Tensor]:
        """The layer of `count`, and what is counted of it at a step."""
        assert self.count is not None
        place, shape = self.count
        return model.layers[place], 2 * torch.randn(shape, generator=torch.Generator().manual_seed(step))

    def loss(self, output: Tensor, target: Tensor, step: int) -> Tensor:
        """A sum over samples by the number of those of the batch, so that micro-batches add up."""
        return (output - target).square().sum() / len(self.inputs[step])


def network(seed: int) -> tuple[Network, Training]:
    """The network of a seed, and its training."""
    # A string of its own for each: equal numbers would make weights and choices go together.
    draw = random.Random(f"network {seed}")
    manual_seed(draw.getrandbits(31))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of even kernels under padding="same"
        model, x = random_network(draw)
        return model, _training(draw, model, x)


def _training(draw: random.Random, model: Network, x: Tensor) -> Training:
    inputs, targets = [], []
    with torch.no_grad():
        wanted = torch.zeros_like(model(x))
    dead = torch.rand(x.shape[1:]) < draw.choice([0.0, 0.0, 0.0, 0.5, 1.0])
    uneven = draw.choice([0.0, 0.0, 1.0])
    for _ in range(draw.choice([2, 3, 5])):
        if x.is_floating_point():
            sizes = (uneven * torch.randn(len(x))).exp().view(-1, *[1] * (x.dim() - 1))
            inputs.append(torch.empty_like(x).copy_(torch.randn(x.shape).masked_fill(dead, 0.0) * sizes))
        else:
            inputs.append(torch.randint_like(x, WORDS))
        targets.append(torch.randn_like(wanted))
    names = [name for name, _ in model.named_parameters()]
    if draw.random() < 0.25:
        names = [name for name in names if name in model.kept or draw.random() < 0.6]
    count = draw.choice([1, 1, 2, 3])
    places = [draw.randrange(count) for _ in names]
    shares = [[name for name, place in zip(names, places, strict=True) if place == k] for k in range(count)]
    groups = sorted(filter(None, shares), key=lambda share: not model.kept & {*share})
    rates = [(10 ** draw.uniform(-3, -2), draw.choice([0.0, 0.0, 0.1])) for _ in groups]
    momentum, nesterov = draw.choice([(0.0, False), (0.9, False), (0.9, True)])
    build: Callable[[Any], Optimizer] = draw.choice(
        [
            lambda groups: SGD(groups, momentum=momentum, nesterov=nesterov),
            lambda groups: AdamW(groups, eps=1e-2),
            lambda groups: Adam(groups, eps=1e-2, amsgrad=nesterov),
            lambda groups: RMSprop(groups, eps=1e-2, momentum=momentum, centered=nesterov),
            lambda groups: Adagrad(groups, initial_accumulator_value=0.1),
        ]
    )
    parts = draw.choice([1, 1, 2]) if len(x) > 1 else 1
    wasted = draw.random() < 0.3
    late = len(groups) > 1 and not model.kept & {*groups[-1]} and draw.random() < 0.8
    read = _read(model, x)
    trained = [n for n in read if f"layers.{n}.weight" in groups[0] and model.layers[n].weight.requires_grad]
    count = draw.choice(trained) if trained and draw.random() < 0.7 else None
    counted = None if count is None else (count, read[count])
    return Training(inputs, targets, parts, wasted, groups, rates, build, late, counted)


def _read(model: Network, x: Tensor) -> dict[int, torch.Size]:
    """The shape of what each layer reads whose rows are known."""
    shapes: dict[int, torch.Size] = {}
    for place, layer in enumerate(model.layers):
        if type(layer) in LAYERS:
            note = lambda _, args, place=place: shapes.update({place: args[0].shape})  # noqa: E731
            layer.register_forward_pre_hook(note)
    with torch.no_grad():
        model(x)
    for layer in model.layers:
        layer._forward_pre_hooks.clear()
    return shapes
