"""Random networks."""

import copy
import importlib.util
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: transformers' linear layer with a transposed weight, where there is one.
Conv1D: Any = None
if importlib.util.find_spec("transformers"):
    from transformers.pytorch_utils import Conv1D

#: The layers that corrections and covariances are for.
LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) + ((Conv1D,) if Conv1D else ())

WORDS = 7


@dataclass(frozen=True)
class Step:
    """One operation of a network."""

    name: str  # "call", "add", "cat", "flatten", "swap" or "mean"
    inputs: tuple[int, ...]  # which earlier values it reads; 0 is the network's input
    layer: int = -1  # the number of the layer that is called
    dims: tuple[int, ...] = ()  # what is joined or averaged


class Network(nn.Module):
    """A list of layers, of what happens with them in order, and one of them that is always trained."""

    def __init__(self, layers: list[nn.Module], steps: list[Step], kept: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.steps = nn.ModuleList(layers), steps
        kept_ones = {id(parameter) for parameter in kept.parameters()} if kept else set()
        self.kept = {name for name, parameter in self.named_parameters() if id(parameter) in kept_ones}

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step in self.steps:
            values.append(self.run(step, [values[place] for place in step.inputs]))
        return values[-1]

    def run(self, step: Step, inputs: list[Tensor]) -> Tensor:
        """The value of one step."""
        first = inputs[0]
        if step.name == "call":
            value: Tensor = self.layers[step.layer](first)
            return value
        if step.name == "add":
            return first + inputs[1]
        if step.name == "cat":
            return torch.cat(inputs, step.dims[0])
        if step.name == "flatten":
            return first.flatten(1)
        if step.name == "swap":
            return first.transpose(-1, -2)
        return first.mean(step.dims)


class _Builder:
    """Draws a network layer by layer, running it as it grows."""

    def __init__(self, draw: random.Random, x: Tensor) -> None:
        self.draw, self.values = draw, [x]
        self.layers: list[nn.Module] = []
        self.steps: list[Step] = []

    @property
    def value(self) -> Tensor:
        return self.values[-1]

    @property
    def is_image(self) -> bool:
        return self.spatial > 0

    spatial = 0  # dimensions behind the channels

    def step(self, name: str, *inputs: int, layer: int = -1, dims: tuple[int, ...] = ()) -> None:
        places = inputs or (len(self.values) - 1,)
        step = Step(name, places, layer, dims)
        model = Network(self.layers, [])
        with torch.no_grad():
            value = model.run(step, [self.values[place] for place in places])
        if not value.numel():
            raise RuntimeError("nothing left")
        self.values.append(value)
        self.steps.append(step)

    def call(self, layer: nn.Module) -> None:
        if layer not in self.layers:
            self.layers.append(layer)
        self.step("call", layer=self.layers.index(layer))

    def attempt(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Call a layer that fits; most convolutions do not."""
        for _ in range(100):
            before = len(self.layers)
            try:
                self.call(layer := build())
            except (RuntimeError, ValueError):
                del self.layers[before:]
            else:
                return layer
        raise AssertionError("no layer fits")

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def activation(self) -> None:
        kinds: list[Callable[[], nn.Module]] = [
            nn.ReLU, nn.ReLU, nn.ReLU, lambda: nn.LeakyReLU(0.1), nn.PReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.Identity,
        ]  # fmt: skip
        if self.is_image or self.value.dim() == 2:
            kinds.append(lambda: nn.PReLU(self.value.shape[1]))
        self.call(self.draw.choice(kinds)())

    def affine(self, keep: bool = False) -> nn.Module:
        """A linear layer or convolution; one that keeps shapes, if asked to."""
        if self.is_image:
            return self.attempt(lambda: self.convolution(keep))
        return self.attempt(lambda: self.linear(keep))

    def linear(self, keep: bool) -> nn.Module:
        features = self.value.shape[-1]
        out = features if keep else self.draw.choice([1, 2, 3, 4, 6, 9])
        straight, bias = self.chance(0.8), self.chance(0.7)  # both, so that most networks do not depend on transformers
        if Conv1D is None or straight:
            return nn.Linear(features, out, bias=bias)
        layer = Conv1D(out, features)
        nn.init.normal_(layer.weight, std=features**-0.5)
        nn.init.normal_(layer.bias)
        return layer  # which refuses some layouts of its input in memory

    def convolution(self, keep: bool) -> nn.Module:
        draw, channels, dims = self.draw, self.value.shape[-self.spatial - 1], self.spatial
        out = channels if keep else draw.choice([1, 2, 3, 4, 2 * channels])
        kernel = tuple(draw.choice([1, 2, 3]) for _ in range(dims))
        stride = 1 if keep else draw.choice([1, 1, 2, tuple(draw.choice([1, 2]) for _ in range(dims))])
        some = tuple(draw.choice([0, 1, 2]) for _ in range(dims))
        return {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims](
            channels, out, kernel, stride,
            padding="same" if keep else draw.choice([0, 1, "same", "valid", some]),
            dilation=draw.choice([1, 1, 2, tuple(draw.choice([1, 2]) for _ in range(dims))]),
            groups=draw.choice([1, 1, draw.randint(1, 4), math.gcd(channels, out)]),
            bias=self.chance(0.7),
            padding_mode=draw.choice(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]),
        )  # fmt: skip

    def plain(self) -> None:
        self.affine()
        self.activation()

    def residual(self) -> None:
        start = len(self.values) - 1
        if self.chance(0.3):
            self.call(nn.Dropout(1.0))  # a layer that reads nothing but zeros
        self.affine(keep=True)
        if self.chance(0.5):
            self.activation()
            self.affine(keep=True)
        self.step("add", start, len(self.values) - 1)

    def joined(self) -> None:
        start = len(self.values) - 1
        self.affine(keep=True)
        self.activation()
        self.step("cat", start, len(self.values) - 1, dims=(-self.spatial - 1,))

    def twice(self) -> None:
        layer = self.affine(keep=True)
        self.activation()
        self.call(layer)

    def tied(self) -> None:
        one: Any = self.affine(keep=True)
        other = copy.deepcopy(one)
        other.weight = one.weight
        if one.bias is not None:
            other.bias = one.bias if self.chance(0.3) else nn.Parameter(torch.randn_like(one.bias))
        self.activation()
        self.call(other)

    def norm(self) -> None:
        affine, channels, features = self.chance(0.8), self.value.shape[1], self.value.shape[-1]
        kinds: list[Callable[[], nn.Module]] = []
        if features > 1:  # one number alone is nothing but its mean
            kinds.append(lambda: nn.LayerNorm(features, elementwise_affine=affine))
        if len(self.value) >= 4 and (self.is_image or self.value.dim() == 2):
            batch_norm = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[self.spatial]
            kinds.append(lambda: batch_norm(channels, affine=affine))
            if features > 1:
                groups = self.draw.choice([1, channels]) if self.is_image else 1
                kinds.append(lambda: nn.GroupNorm(groups, channels, affine=affine))
        layer: Any = self.attempt(self.draw.choice(kinds or [nn.ReLU]))
        if affine and kinds:
            nn.init.uniform_(layer.weight, 0.5, 2.0)
            nn.init.normal_(layer.bias)

    def pool(self) -> None:
        name = self.draw.choice(["MaxPool", "AvgPool", "AdaptiveAvgPool"])
        kind = getattr(nn, f"{name}{self.spatial}d")
        self.attempt(lambda: kind(self.draw.choice([1, 2])))

    def over_tokens(self) -> None:
        self.step("swap")
        self.spatial = 1
        self.affine()
        self.spatial = 0
        self.step("swap")

    def block(self) -> None:
        blocks = [self.plain, self.plain, self.residual, self.joined, self.twice, self.tied, self.norm]
        if self.is_image:
            blocks += [self.pool, self.plain]
        elif self.value.dim() == 3:
            blocks.append(self.over_tokens)
        self.draw.choice(blocks)()

    def flat(self) -> None:
        """Leave an image, or not."""
        if not self.is_image or self.chance(0.2):
            return
        if self.chance(0.7):
            self.step("flatten")
        else:
            self.step("mean", dims=tuple(range(-self.spatial, 0)))
        self.spatial = 0


def _example(draw: random.Random, batch: int) -> tuple[Tensor, int]:
    """An input, and how many spatial dimensions it has."""
    kind = draw.choice(["image", "image", "rows", "tokens", "words"])
    if kind == "words":
        return torch.randint(WORDS, (batch, draw.randint(2, 4))), 0
    if kind == "image":
        dims = draw.choice([1, 2, 2, 3])
        most = {1: 9, 2: 6, 3: 4}[dims]
        return torch.randn(batch, draw.randint(1, 4), *(draw.randint(3, most) for _ in range(dims))), dims
    features = draw.randint(1, 7)
    leading = () if kind == "rows" else draw.choice([(3,), (2, 2)])
    return torch.randn(batch, *leading, features), 0


def random_network(draw: random.Random) -> tuple[Network, Tensor]:
    """A network and a batch that it reads."""
    x, spatial = _example(draw, draw.choice([5, 6, 4, 8, 3, 2, 1]))
    if draw.random() < 0.2:
        x = x.movedim(0, -1).contiguous().movedim(-1, 0)  # samples innermost in memory
    builder = _Builder(draw, x)
    table = None
    if not x.is_floating_point():
        table = nn.Embedding(WORDS, draw.randint(2, 6))
        builder.call(table)
    builder.spatial = spatial
    for _ in range(draw.randint(1, 3)):
        builder.block()
    builder.flat()
    if draw.random() < 0.5:
        builder.block()
    kept = builder.affine()
    if table is not None and draw.random() < 0.4:
        builder.activation()
        builder.call(nn.Linear(builder.value.shape[-1], table.embedding_dim))
        head = nn.Linear(table.embedding_dim, WORDS)
        head.weight = table.weight
        builder.call(head)
    if draw.random() < 0.2:
        builder.layers.append(nn.Linear(3, 2))  # never called
    model = Network(builder.layers, builder.steps, kept)
    if draw.random() < 0.4:
        for parameter in model.parameters():
            parameter.requires_grad_(draw.random() < 0.75)
    if draw.random() < 0.2:
        layer: Any = draw.choice([layer for layer in model.layers if isinstance(layer, LAYERS)])
        with torch.no_grad():
            layer.weight.masked_fill_(torch.rand_like(layer.weight) >= draw.choice([0.0, 0.5, 0.9]), 0.0)
    for parameter in kept.parameters():
        parameter.requires_grad_()
    return model, x
