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
    """3×3 convolutions of stride 2, an activation behind each, and an affine layer, all behind the method's normaliser.

    Images come flattened, in so many features; each convolution halves them. The pixels that are left are averaged, if
    pooled, or handed on as they are.
    """
    inputs = next((channels for channels in (1, 3) if isqrt(features // channels) ** 2 * channels == features), None)
    if inputs is None:
        raise ValueError(f"{features} features are no square image of 1 or 3 channels; choose --network mlp.")
    side = isqrt(features // inputs)
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
