"""The networks compared, as every method builds them; drawn by PyTorch's default initialisation."""

from collections.abc import Callable
from itertools import pairwise
from math import isqrt

from torch import nn

from ..methods import Method

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "leaky-relu": nn.LeakyReLU}

#: Convolutional networks by name, and whether they average over space before their last layer.
CONVOLUTIONAL = {"cnn-pool": True, "cnn": False}


def mlp(method: Method, sizes: tuple[int, ...], activation: str) -> nn.Sequential:
    """Affine layers of these sizes, each behind the method's normaliser, activations between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        if layers:
            layers.append(ACTIVATIONS[activation]())
        layers += [*method.normalizers((inputs,)), method.linear(inputs, outputs)]
    return nn.Sequential(*layers)


def cnn(
    method: Method, features: int, channels: tuple[int, ...], classes: int, activation: str, *, pool: bool
) -> nn.Sequential:
    """3×3 convolutions of stride 2 and an affine layer, each behind the method's normaliser.

    Args:
        method: whose layers and normalisers.
        features: numbers per image, which comes flattened.
        channels: of every convolution's output; each halves the image.
        classes: outputs.
        activation: a key of `ACTIVATIONS`, behind every convolution.
        pool: average over the pixels that are left. If not, they are handed on as they are.
    """
    inputs, side = image_shape(features)
    layers: list[nn.Module] = [nn.Unflatten(1, (inputs, side, side))]
    for outputs in channels:
        layers += method.normalizers((inputs, side, side))
        layers += [method.convolution(inputs, outputs, 3, stride=2, padding=1), ACTIVATIONS[activation]()]
        inputs, side = outputs, (side + 1) // 2
    if pool:
        layers.append(nn.AdaptiveAvgPool2d(1))
        side = 1
    width = inputs * side**2
    return nn.Sequential(*layers, nn.Flatten(), *method.normalizers((width,)), method.linear(width, classes))


def image_shape(features: int) -> tuple[int, int]:
    """Channels and side of the square image that so many numbers are.

    Raises:
        ValueError: neither they nor a third of them are a square.
    """
    for channels in (1, 3):
        side = isqrt(features // channels)
        if channels * side**2 == features:
            return channels, side
    raise ValueError(f"{features} features are no square image of 1 or 3 channels; choose --network mlp.")
