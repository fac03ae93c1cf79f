"""A picture learned from (x, y) by a coordinate network; the error is the mean square, of colours from -1 to 1."""

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.cbook import get_sample_data
from matplotlib.image import imread
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from ..methods import METHODS
from ..train import FieldRun, Problem, kind_of, normalised


class Network(NamedTuple):
    """A coordinate network."""

    layers: int  # linear ones
    width: int
    frequencies: int = 0  # of random Fourier features in front, drawn with deviation 3; 0 is none
    omega: float = 0.0  # of SIREN's sines; 0 is ReLU


NETWORKS = {
    "relu": Network(10, 28),
    "fourier": Network(10, 28, frequencies=32),
    "siren": Network(5, 128, omega=30.0),
    "wide": Network(5, 256, frequencies=32),
}
#: Squares of photographs, by side: 192 pixels averaged to 64, or 256 to 128. The last four of 64 are of a third
#: photograph, which trials alone learn.
CROPS = {
    64: [("china", 192, 192), ("flower", 192, 192), *(
        (name, top, left) for name in ("china", "flower") for top, left in product((0, 192), (0, 192, 384))
        if (top, left) != (192, 192)
    ), *(("hopper", top, left) for top, left in product((0, 192), (0, 192)))],
    128: [("china", 85, 192), ("flower", 85, 192), *(
        (name, top, left) for name in ("china", "flower") for top, left in ((0, 0), (171, 384), (0, 384))
    )],
}  # fmt: skip
_CUT = {64: 192, 128: 256}
FREQUENCY_DEVIATION = 3.0


@dataclass(frozen=True)
class CoordinateRun(FieldRun):
    """One crop, learned by one seed."""

    network: str = "relu"
    size: int = 64  # pixels a side
    crop: int = 0  # of `CROPS`
    batch_size: int | None = None  # pixels in a step; None is all
    deviation: float | None = None  # of the Fourier features' frequencies, in place of 3
    held_out: bool | None = None  # whether every other pixel is learned, and the error is that of the rest
    time_of: int | None = None  # so many steps of bare Adam take as long as this run's steps

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("batch_size", "deviation", "time_of")
        self.check(positive, network=NETWORKS, size=CROPS, crop=range(len(CROPS[self.size])))


@cache
def picture(name: str) -> Tensor:
    """A picture of scikit-learn, or matplotlib's portrait of Hopper: (3, height, width), between -1 and 1."""
    if name == "hopper":
        image = imread(get_sample_data("grace_hopper.jpg", asfileobj=False))
    else:
        image = load_sample_image(f"{name}.jpg")
    return torch.tensor(image).permute(2, 0, 1).float() / 127.5 - 1


@cache
def pixels(size: int, crop: int) -> tuple[Tensor, Tensor]:
    """Coordinates between -1 and 1, and colours, each with a row for a pixel."""
    name, top, left = CROPS[size][crop]
    cut = _CUT[size]
    colours = F.avg_pool2d(picture(name)[:, top : top + cut, left : left + cut], cut // size)
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    return torch.cartesian_prod(axis, axis), colours.permute(1, 2, 0).reshape(-1, 3)


class Sine(nn.Module):
    """SIREN's activation, sin ωx (Sitzmann et al. 2020)."""

    def __init__(self, omega: float) -> None:
        super().__init__()
        self.omega = omega

    def forward(self, x: Tensor) -> Tensor:
        """Return sin ωx."""
        return torch.sin(self.omega * x)


class FourierFeatures(nn.Module):
    """The sines and cosines of random projections of the coordinates (Tancik et al. 2020), which do not train."""

    projections: Tensor

    def __init__(self, frequencies: int, deviation: float) -> None:
        super().__init__()
        self.register_buffer("projections", math.pi * deviation * torch.randn(2, frequencies))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of (…, 2) coordinates."""
        angles = x @ self.projections
        return torch.cat([angles.sin(), angles.cos()], -1)


def build(network: Network, norm: str, deviation: float = FREQUENCY_DEVIATION) -> nn.Sequential:
    """Draw a network: PyTorch's initialisation, or SIREN's own."""
    parts: list[nn.Module] = [FourierFeatures(network.frequencies, deviation)] if network.frequencies else []
    widths = [2 * network.frequencies or 2, *[network.width] * (network.layers - 1), 3]
    for place, (inputs, outputs) in enumerate(pairwise(widths)):
        layer = nn.Linear(inputs, outputs)
        if network.omega:
            bound = math.sqrt(6 / inputs) / network.omega if place else 1 / inputs
            nn.init.uniform_(layer.weight, -bound, bound)
        parts.append(layer)
        if place < network.layers - 1:
            parts += [*normalised(outputs, norm), Sine(network.omega) if network.omega else nn.ReLU()]
    return nn.Sequential(*parts)


class Fit(Problem):
    """A network that learns one crop."""

    def __init__(self, run: CoordinateRun) -> None:
        self.run, (inputs, colours) = run, pixels(run.size, run.crop)
        is_odd = torch.arange(run.size).view(-1, 1).add(torch.arange(run.size)).flatten() % 2 == 1
        learned, judged = (is_odd, ~is_odd) if run.held_out else (slice(None), slice(None))
        self.inputs, self.colours = inputs[learned], colours[learned]
        self.judged = inputs[judged], colours[judged]
        self.generator = torch.Generator().manual_seed(run.seed)

    def model(self, run: CoordinateRun) -> nn.Module:
        """Draw the network."""
        torch.manual_seed(run.seed)
        return build(NETWORKS[run.network], run.norm, run.deviation or FREQUENCY_DEVIATION)

    def loss(self, model: nn.Module, optimizer: Any) -> Tensor:
        """The mean squared error, over all pixels or over some that are drawn."""
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


COORDINATES = kind_of(Fit)

#: Normaliser, optimizer, wrapper. Where a search begins: learning rate, and damping.
Arm = tuple[str, str, str]
STARTS = {"adam": 1e-2, "muon": 3.2e-2, "soap": 3.2e-2, "sgd": 0.32, "momentum": 1e-2}


def first_trial(like: CoordinateRun, arm: Arm) -> CoordinateRun:
    """The trial that an arm's search begins with."""
    norm, optimizer, method = arm
    damping = 0.1 if METHODS[method].damped else None
    return replace(like, norm=norm, optimizer=optimizer, method=method, lr=STARTS[optimizer], damping=damping)
