"""Networks that hypothesis makes up: convolutions, linear layers, tied and frozen ones, of any width, for any batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.seeds import manual_seed

HOMOGENEOUS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky-relu": lambda: nn.LeakyReLU(0.1),
    "prelu": nn.PReLU,
    "identity": nn.Identity,
}
ACTIVATIONS = {**HOMOGENEOUS, "tanh": nn.Tanh, "gelu": nn.GELU}
SIZE, CHANNELS = 5, 2


@dataclass(frozen=True)
class Conv:
    """A convolution; `grouped` is into as many groups as channels allow."""

    channels: int
    kernel: int
    stride: int
    padding: int
    grouped: bool


@dataclass(frozen=True)
class Architecture:
    """A network and a batch for it.

    Args:
        dims: of the convolutions; 0 is none of them.
        convolutions: what the network begins with, if there are dims.
        widths: of the linear layers that follow, outputs last.
        activation: between all layers.
        tied: whether the first linear layer is followed by two square ones that share a weight.
        unbiased: whether the n-th layer lacks a bias.
        frozen: whether the n-th parameter is frozen; those of the last layer never are.
        batch: samples.
        seed: of the weights.
    """

    dims: int
    convolutions: tuple[Conv, ...]
    widths: tuple[int, ...]
    activation: str
    tied: bool
    unbiased: tuple[bool, ...]
    frozen: tuple[bool, ...]
    batch: int
    seed: int

    def model(self, seed: int = 0) -> Any:
        """The network, in the default dtype."""
        manual_seed(self.seed + seed)
        biased, layers = (not flag for flag in self.unbiased), []
        features = CHANNELS * SIZE
        if self.dims:
            kind, channels, size = {1: nn.Conv1d, 2: nn.Conv2d}[self.dims], CHANNELS, SIZE
            for conv in self.convolutions:
                kernel = min(conv.kernel, size + 2 * conv.padding)
                groups = math.gcd(channels, conv.channels) if conv.grouped else 1
                layers += [
                    kind(channels, conv.channels, kernel, conv.stride, conv.padding, groups=groups, bias=next(biased)),
                    ACTIVATIONS[self.activation](),
                ]
                channels, size = conv.channels, (size + 2 * conv.padding - kernel) // conv.stride + 1
            features = channels * size**self.dims
        layers.append(nn.Flatten())
        first, *rest = self.widths
        for width in (first, *([first, first] if self.tied else []), *rest):
            layers += [nn.Linear(features, width, bias=next(biased)), ACTIVATIONS[self.activation]()]
            features = width
        model = nn.Sequential(*layers[:-1])
        if self.tied:
            one, other = [layer for layer in model if isinstance(layer, nn.Linear)][1:3]
            other.weight = one.weight
        for parameter, frozen in zip(model[:-1].parameters(), self.frozen, strict=False):
            parameter.requires_grad_(not frozen)
        return model

    def inputs(self, count: int = 1) -> list[Tensor]:
        """So many batches."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, CHANNELS) + (SIZE,) * max(1, self.dims)
        return [torch.randn(shape, generator=generator) for _ in range(count)]


# Of a choice, hypothesis takes the first far more often than the others: it is not the simplest here but a typical one.
_CONVOLUTION = st.builds(
    Conv,
    channels=st.sampled_from([3, 4, 2, 1]),
    kernel=st.sampled_from([2, 3, 1]),
    stride=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1]),
    grouped=st.booleans(),
)
_ONE_IN_THREE = st.tuples(*[st.sampled_from([False, False, True])] * 8)


def architectures(activations: Any = ACTIVATIONS) -> st.SearchStrategy[Architecture]:
    """Networks with one of these activations."""
    return st.builds(
        Architecture,
        batch=st.sampled_from([5, 3, 2, 7, 1]),
        dims=st.sampled_from([2, 0, 1]),
        activation=st.sampled_from(list(activations)),
        tied=st.booleans(),
        convolutions=st.lists(_CONVOLUTION, min_size=1, max_size=2).map(tuple),
        widths=st.lists(st.sampled_from([4, 6, 3, 2, 5, 1]), min_size=2, max_size=4).map(tuple),
        unbiased=_ONE_IN_THREE,
        frozen=st.sampled_from([(False,) * 8]) | _ONE_IN_THREE,
        seed=st.integers(0, 2**16),
    )


def on_generated_models(
    *names: str, activations: Any = ACTIVATIONS, count: int = 42
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a test of (name, architecture), for every name; or of (architecture), if there are no names.

    The names share so many models among them, each having its own, which are the same in every run and every test.
    """
    share = settings(
        max_examples=-(-count // max(1, len(names))),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        def run(*name: str) -> None:
            @seed(names.index(*name) if name else 0)
            @share
            @given(architectures(activations))
            def on_each(architecture: Architecture) -> None:
                test(*name, architecture)

            on_each()

        # Of their own signature, by which pytest knows what to pass.
        def with_name(name: str) -> None:
            run(name)

        def without_name() -> None:
            run()

        return pytest.mark.parametrize("name", names)(with_name) if names else without_name

    return decorated
