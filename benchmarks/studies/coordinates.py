"""Coordinate networks: a picture learned from (x, y), with and without normalisers, by bare and by wrapped optimizers.

Each arm is a normaliser, an optimizer and a wrapper. Its learning rate (and damping) come from ten trials, each of them
on two crops that no table shows. Then it learns other crops, each by a seed of its own: arms are compared in pairs.
"""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.cbook import get_sample_data
from matplotlib.image import imread
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from ..core.runs import add_progress_arguments, run_all
from ..core.store import Store
from ..core.study import Recipe, Sections, Study
from ..core.table import estimate
from ..core.tune import around, choose
from ..fields.report import Look, sections
from ..fields.run import NORMS, FieldRun, Problem, kind_of, normalised
from ..methods import METHODS


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
#: Of crops in front, those that trials learn.
TUNED_ON = (0, 1)
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


_LOOK = Look(
    psnr,
    partial(estimate, digits=1),
    "PSNR, dB",
    "{:+.1f}".format,
    about="Mean ± standard error over crops, each by its own seed. Learning rate and damping are the best of an "
    "arm's trials, each on two other crops. p is of the paired t test over the crops. Learning rates rise over 20 "
    "steps and fall to 0 by a cosine. Muon trains the matrices inside the network, Adam the rest at the same rate.",
)


def _named(settings: Mapping[str, Any]) -> tuple[str, str]:
    network, size, batch = NETWORKS[settings["network"]], settings["size"], settings.get("batch_size")
    what = f"{network.layers} linear layers of width {network.width}, {'sines' if network.omega else 'ReLU'}"
    features = f" behind {network.frequencies} Fourier features" * bool(network.frequencies)
    pixels = f"{batch} pixels a step" if batch else "all pixels in every step"
    heading = f"{what}{features}; {size} × {size} pixels, {pixels}, {settings['steps']} steps"
    return f"{settings['network']}-{size}{f'-batch-{batch}' if batch else ''}", heading


def report(store: Store, name: str, folder: Path) -> Sections:
    """A section for every network, size of crops and batch size."""
    return sections(store, name, folder, _LOOK, _named, lambda arm: arm[:3] in MAIN)


COORDINATES = kind_of(Fit)

#: Normaliser, optimizer, wrapper. Where a search begins: learning rate, and damping.
Arm = tuple[str, str, str]
STARTS = {"adam": 1e-2, "muon": 3.2e-2, "soap": 3.2e-2, "sgd": 0.32, "momentum": 1e-2}
WRAPPED = ("none", "whitened", "whitened-16")
OPTIMIZERS_HERE = ("adam", "muon", "soap")
MAIN: list[Arm] = [
    *product(["none"], OPTIMIZERS_HERE, ["none", "whitened"]),
    *product(["batchnorm"], OPTIMIZERS_HERE, ["none"]),
    ("batchnorm", "muon", "whitened"),
    ("batchnorm", "soap", "whitened"),
]
OTHERS: list[Arm] = [
    ("none", "adam", "input-scaled"), ("none", "adam", "preconditioned"), ("none", "muon", "preconditioned"),
    ("none", "sgd", "batch-ideal"), ("none", "momentum", "mac"), ("none", "adam", "mac"), ("none", "muon", "mac"),
]  # fmt: skip
_RANK_16: list[Arm] = [("none", optimizer, "whitened-16") for optimizer in OPTIMIZERS_HERE]
ALL: list[Arm] = list(dict.fromkeys([
    *MAIN, *OTHERS, *_RANK_16, ("batchnorm", "adam", "whitened"), ("layernorm", "adam", "none"),
    *product(NORMS, OPTIMIZERS_HERE, WRAPPED),
]))  # fmt: skip
#: The arms of each protocol, (network, side, batch size, steps), most valuable first; and how many crops there are.
PROTOCOLS: dict[tuple[str, int, int | None, int], tuple[Sequence[Arm], int]] = {
    ("relu", 64, None, 500): (ALL, 10),
    ("relu", 64, 512, 500): (MAIN, 10),
    ("fourier", 64, None, 500): (MAIN, 10),
    ("relu", 128, None, 2000): (MAIN[:8], 5),
    ("siren", 64, None, 500): (MAIN[:6], 5),
    ("wide", 64, None, 500): (MAIN[:4], 5),
}


def first_trial(like: CoordinateRun, arm: Arm) -> CoordinateRun:
    """The trial that an arm's search begins with."""
    norm, optimizer, method = arm
    damping = 0.1 if METHODS[method].damped else None
    return replace(like, norm=norm, optimizer=optimizer, method=method, lr=STARTS[optimizer], damping=damping)


def _on(run: CoordinateRun, crops: Iterable[int]) -> list[CoordinateRun]:
    return [replace(run, crop=crop, seed=crop) for crop in crops]


def _run(options: argparse.Namespace, store: Store) -> None:
    for (network, size, batch_size, steps), (arms, crops) in PROTOCOLS.items():
        if options.network not in (None, network) or options.size not in (None, size):
            continue
        if options.batch_size not in (None, batch_size or 0):
            continue
        like = CoordinateRun(
            "china, flower", "none", network=network, size=size, batch_size=batch_size, steps=options.steps or steps
        )
        # The settings of larger crops are those of the smaller ones, whose trials take a sixteenth of the time.
        small = replace(like, size=64, steps=options.steps or 500)
        for arm in arms:
            search = around(first_trial(small, arm), options.trials)
            each = partial(_on, crops=TUNED_ON)
            (chosen,) = choose([search], COORDINATES, store, lambda error: -psnr(error), each=each)
            shown = range(len(TUNED_ON), len(TUNED_ON) + min(options.crops or crops, crops))
            run_all(_on(replace(chosen, size=size, steps=like.steps), shown), COORDINATES, store)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", choices=NETWORKS, help="this one alone")
    parser.add_argument("--size", type=int, choices=CROPS, help="crops of this side alone")
    parser.add_argument("--batch-size", type=int, metavar="PIXELS", help="steps of this size alone; 0 is all pixels")
    parser.add_argument("--trials", type=int, default=10, help="that choose an arm's learning rate and damping")
    parser.add_argument("--crops", type=int, help="this many at most")
    parser.add_argument("--steps", type=int, help="in place of each protocol's own")
    add_progress_arguments(parser)


STUDIES = {
    "coordinates": Study(
        "coordinate networks: a picture learned from (x, y)", _run, report, _arguments, makes=[Recipe(8.0)],
        smoke="--network siren --trials 1 --crops 1 --steps 1", page="docs/results/fields.md",
    ),
}  # fmt: skip
