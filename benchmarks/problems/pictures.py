"""A picture learned from (x, y) by a coordinate network; the error is the mean square, of colours from -1 to 1."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.cbook import get_sample_data
from matplotlib.image import imread
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from ..train import FieldRun, Problem, kind_of, perceptron

#: Standard deviation of the features' frequencies, and the frequency of SIREN's sines.
DEVIATION, OMEGA = 3.0, 30.0
#: Side of a crop → that of the square of a photograph which is averaged to it.
CUTS = {64: 192, 128: 256}
_BOTH = ("china", "flower")
#: By side: photograph, (top, left). Only trials learn the last four of 64.
CROPS = {
    64: [
        *((name, (192, 192)) for name in _BOTH), *product(_BOTH, [(0, 0), (0, 192), (0, 384), (192, 0), (192, 384)]),
        *product(["hopper"], product((0, 192), (0, 192))),
    ],
    128: [*((name, (85, 192)) for name in _BOTH), *product(_BOTH, [(0, 0), (171, 384), (0, 384)])],
}  # fmt: skip


class Sine(nn.Module):
    """SIREN's activation (Sitzmann et al. 2020)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(OMEGA * x)


def siren_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer by SIREN's initialisation; the first is the one that reads both coordinates."""
    layer = nn.Linear(inputs, outputs)
    bound = 1 / inputs if inputs == 2 else math.sqrt(6 / inputs) / OMEGA
    nn.init.uniform_(layer.weight, -bound, bound)
    return layer


def he_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer whose weights He et al. (2015) draw for ReLU."""
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight)
    return layer


class Network(NamedTuple):
    """A coordinate network."""

    layers: int  # linear ones
    width: int
    frequencies: int = 0  # of random Fourier features in front; 0 is none
    activation: Callable[[], nn.Module] = nn.ReLU
    linear: Callable[[int, int], nn.Linear] = nn.Linear
    about: str = "ReLU"  # activation and initialisation


NETWORKS = {
    "relu": Network(10, 28),
    "he": Network(10, 28, linear=he_linear, about="ReLU, He's initialisation"),
    "deep": Network(20, 28),
    "fourier": Network(10, 28, frequencies=32),
    "siren": Network(5, 128, activation=Sine, linear=siren_linear, about="sines"),
    "siren-32": Network(5, 32, activation=Sine, linear=siren_linear, about="sines"),
    "wide": Network(5, 256, frequencies=32),
}


@dataclass(frozen=True)
class CoordinateRun(FieldRun):
    """One crop, learned by one seed."""

    network: str = "relu"
    size: int = 64  # pixels a side
    crop: int = 0  # of `CROPS`
    batch_size: int | None = None  # pixels in a step; None is all
    deviation: float | None = None  # of the Fourier features' frequencies, in place of `DEVIATION`
    held_out: bool | None = None  # whether every other pixel is learned, and the error is that of the rest
    time_of: int | None = None  # so many steps of bare Adam take as long as this run's steps

    known, positive = {"network": NETWORKS, "size": CROPS}, ("batch_size", "deviation", "time_of")


@cache
def pixels(size: int, crop: int) -> tuple[Tensor, Tensor]:
    """Coordinates and colours between -1 and 1, each with a row for a pixel."""
    (name, (top, left)), cut = CROPS[size][crop], CUTS[size]
    image = imread(get_sample_data("grace_hopper.jpg", False)) if name == "hopper" else load_sample_image(f"{name}.jpg")
    square = torch.tensor(image[top : top + cut, left : left + cut]).permute(2, 0, 1).float() / 127.5 - 1
    colours = F.avg_pool2d(square, cut // size)
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    return torch.cartesian_prod(axis, axis), colours.permute(1, 2, 0).reshape(-1, 3)


class FourierFeatures(nn.Module):
    """The sines and cosines of random projections of the coordinates (Tancik et al. 2020), which do not train."""

    projections: Tensor

    def __init__(self, frequencies: int, deviation: float) -> None:
        super().__init__()
        self.register_buffer("projections", math.pi * deviation * torch.randn(2, frequencies))

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.projections
        return torch.cat([angles.sin(), angles.cos()], -1)


class Fit(Problem):
    """A network that learns one crop."""

    def __init__(self, run: CoordinateRun) -> None:
        self.run, self.generator = run, torch.Generator().manual_seed(run.seed)
        inputs, colours = pixels(run.size, run.crop)
        is_odd = torch.arange(run.size).view(-1, 1).add(torch.arange(run.size)).flatten() % 2 == 1
        learned, judged = (is_odd, ~is_odd) if run.held_out else (slice(None), slice(None))
        self.inputs, self.colours, self.judged = inputs[learned], colours[learned], (inputs[judged], colours[judged])

    def model(self) -> nn.Module:
        torch.manual_seed(self.run.seed)
        layers, width, frequencies, activation, linear, _ = NETWORKS[self.run.network]
        features = [FourierFeatures(frequencies, self.run.deviation or DEVIATION)] if frequencies else []
        widths = [2 * frequencies or 2, *[width] * (layers - 1), 3]
        return nn.Sequential(*features, *perceptron(widths, self.run.norm, activation, linear))

    def loss(self, model: nn.Module, optimizer: Any) -> Tensor:
        if self.run.batch_size is None:
            return F.mse_loss(model(self.inputs), self.colours)
        rows = torch.randint(len(self.inputs), (self.run.batch_size,), generator=self.generator)
        return F.mse_loss(model(self.inputs[rows]), self.colours[rows])

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """The mean squared error over all pixels, or those held out; of batches by BatchNorm's running statistics."""
        inputs, colours = self.judged
        model.train(self.run.batch_size is None)
        error = F.mse_loss(model(inputs), colours).item()
        model.train()
        return error


def psnr(error: float) -> float:
    """The peak signal-to-noise ratio in dB: colours have a range of 2."""
    return -10 * math.log10(max(error, 1e-20) / 4)


def by_crop(crops: Iterable[int], **settings: Any) -> list[dict[str, Any]]:
    """Settings of a run on each of some crops, by a seed of its own."""
    return [{"crop": crop, "seed": crop, **settings} for crop in crops]


COORDINATES = kind_of(Fit)
