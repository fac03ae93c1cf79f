"""A Fourier neural operator that learns Burgers' equation, and RealNVP, which learns a density.

Settings of an arm come from trials with data and a network of another seed, until the best learning rate is inside.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.datasets import load_sample_images, make_moons
from torch import Tensor, nn

from ..core.arms import Arm, compete, errors, first_trial, label
from ..core.runs import check_known
from ..core.store import Result, Store, setting
from ..core.study import Compared, Recipe, Sections, Study, check_length
from ..core.tables import Cell, Section, grouped, machine, pivot, ranged
from ..train import NORMS, FieldRun, Problem, kind_of, perceptron

#: Functions that train and test; points at which they are given; viscosity.
TRAIN, TEST, POINTS, VISCOSITY = 1000, 200, 128, 0.003
#: Of the operator: channels, Fourier modes, blocks, functions in a batch.
CHANNELS, MODES, BLOCKS, BATCH = 32, 16, 4, 20
#: Of a flow: coupling layers, units of both hidden layers, rows in a batch, rows that test.
COUPLINGS, HIDDEN, ROWS, TEST_ROWS = 8, 64, 256, 10000
#: What is learned → its column.
TITLES = {
    "burgers": "operator, relative error", "moons": "flow, two moons, nats",
    "patches": "flow, squares of photographs, nats",
}  # fmt: skip


@dataclass(frozen=True)
class SurrogateRun(FieldRun):
    """One operator or flow, by one seed."""

    data_set: str = "burgers"
    spectral_rate: float | None = None  # of Fourier modes' weights, in learning rates of the rest
    start: str | None = None  # "zero": couplings begin as the identity
    longer: float | None = None  # steps in units of those of other arms

    norms = (*FieldRun.norms, "columns")  # whitened once, before training
    known, positive = {"data_set": TITLES}, ("spectral_rate",)


@cache
def burgers(seed: int, steps: int = 500, oversampling: int = 2) -> tuple[Tensor, Tensor]:
    """Solve uₜ + u uₓ = ν uₓₓ from smooth random functions of period 1; return (n, 128) at times 0 and 1.

    They are from N(0, 625 (25 − Δ)⁻²), as Li et al. (2021) draw them; Runge and Kutta's method of order 4 takes the
    steps, with an integrating factor.
    """
    generator, size = np.random.default_rng(seed), POINTS * oversampling
    k = 2j * np.pi * np.arange(size // 2 + 1)
    draws = generator.normal(size=(2, TRAIN + TEST, POINTS // 2))
    spectrum = np.zeros((TRAIN + TEST, size // 2 + 1), complex)
    spectrum[:, 1 : POINTS // 2 + 1] = size / 2**0.5 * (draws[0] + 1j * draws[1])
    spectrum *= 25 / (25 - k**2)
    decay = np.exp(VISCOSITY * k**2 / steps / 2)

    def slope(v: np.ndarray) -> np.ndarray:
        return -k / 2 * np.fft.rfft(np.fft.irfft(v) ** 2) * (np.abs(k) < 2 * np.pi * size / 3) / steps

    first = np.fft.irfft(spectrum)
    for _ in range(steps):
        a = slope(spectrum)
        b = slope(decay * (spectrum + a / 2))
        c = slope(decay * spectrum + b / 2)
        d = slope(decay**2 * spectrum + decay * c)
        spectrum = decay**2 * (spectrum + a / 6) + decay * (b + c) / 3 + d / 6
    pair = (u[:, ::oversampling] for u in (first, np.fft.irfft(spectrum)))
    return tuple(torch.tensor(u).float() for u in pair)  # type: ignore[return-value]


class Spectral(nn.Module):
    """Multiply each of the lowest Fourier modes of (n, points, channels) by a matrix of its own."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        # To Adam a weight that is `rate` times its parameter has a learning rate that is as many times higher.
        self.rate = rate
        deviation = (2 / (CHANNELS + CHANNELS)) ** 0.5 / 2**0.5
        self.weight = nn.Parameter(deviation / rate * torch.randn(MODES, CHANNELS, CHANNELS, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return what stands beside the linear layer of a block."""
        modes = torch.fft.rfft(x, dim=1, norm="forward")[:, :MODES]
        weight = torch.view_as_complex(self.rate * self.weight)
        return torch.fft.irfft(torch.einsum("nki,kio->nko", modes, weight), x.shape[1], dim=1, norm="forward")


class Operator(nn.Module):
    """A Fourier neural operator in one dimension (Li et al. 2021), from u and x at points to u at time 1."""

    def __init__(self, norm: str, rate: float) -> None:
        super().__init__()
        self.lift, project = nn.Linear(2, CHANNELS), nn.Sequential(*perceptron((CHANNELS, 64, 1), "none", nn.GELU))
        self.modes = nn.ModuleList(Spectral(rate) for _ in range(BLOCKS))
        self.beside = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(BLOCKS))
        self.norms = nn.ModuleList(nn.Sequential(*(kind(CHANNELS) for kind in NORMS[norm])) for _ in range(BLOCKS))
        self.project = project  # last, as Muon leaves the last matrix to Adam

    def forward(self, u: Tensor) -> Tensor:
        where = torch.linspace(0, 1, u.shape[1] + 1)[:-1].expand_as(u)
        x = self.lift(torch.stack([u, where], -1))
        for place, (modes, beside, norm) in enumerate(zip(self.modes, self.beside, self.norms, strict=True)):
            x = norm(modes(x) + beside(x))
            x = F.gelu(x) if place < BLOCKS - 1 else x
        return self.project(x).squeeze(-1)


class Burgers(Problem):
    """Functions at time 1 from those at time 0; the error is the relative one, a mean over functions that test."""

    def __init__(self, run: SurrogateRun) -> None:
        self.run, self.generator = run, torch.Generator().manual_seed(run.seed)
        first, last = burgers(run.seed)
        self.first, self.last = first.split([TRAIN, TEST]), last.split([TRAIN, TEST])

    def model(self) -> nn.Module:
        torch.manual_seed(self.run.seed)
        return Operator(self.run.norm, self.run.spectral_rate or 1.0)

    def loss(self, model: nn.Module, optimizer: object) -> Tensor:
        drawn = torch.randperm(TRAIN, generator=self.generator)[:BATCH]
        return relative(model(self.first[0][drawn]), self.last[0][drawn])

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """The same of functions that test."""
        return relative(model(self.first[1]), self.last[1]).item()


def relative(u: Tensor, true: Tensor) -> Tensor:
    """The mean over functions of |u − true| / |true|."""
    return ((u - true).norm(dim=1) / true.norm(dim=1)).mean()


def moons(generator: np.random.Generator, rows: int, are_to_test: bool) -> np.ndarray:
    """Two half circles with noise."""
    return make_moons(rows, noise=0.05, random_state=int(generator.integers(2**31)))[0]


@cache
def _windows(are_to_test: bool) -> np.ndarray:
    """All grey squares of 8 × 8 pixels in two photographs: the left three quarters train, the rest tests."""
    parts = []
    for image in load_sample_images().images:
        grey, edge = image.mean(-1).round().astype(np.uint8), 3 * image.shape[1] // 4
        parts.append(sliding_window_view(grey[:, edge:] if are_to_test else grey[:, :edge], (8, 8)).reshape(-1, 64))
    return np.concatenate(parts)


def patches(generator: np.random.Generator, rows: int, are_to_test: bool) -> np.ndarray:
    """Squares as those of BSDS300: noise in place of rounding, the mean taken off, the last pixel left out."""
    every = _windows(are_to_test)
    x = every[generator.integers(len(every), size=rows)]
    x = (x + generator.uniform(size=x.shape)) / 256
    return (x - x.mean(1, keepdims=True))[:, :-1]


class RealNVP(nn.Module):
    """Affine couplings (Dinh, Sohl-Dickstein and Bengio 2017), every other one of the second half of the columns."""

    def __init__(self, columns: int, norm: str, start: str | None) -> None:
        super().__init__()
        self.sizes = [columns // 2, columns - columns // 2]
        self.couplings = nn.ModuleList()
        for place in range(COUPLINGS):
            inputs, outputs = self.sizes if place % 2 == 0 else self.sizes[::-1]
            layers = perceptron((inputs, HIDDEN, HIDDEN, 2 * outputs), norm)
            if start == "zero":
                nn.init.zeros_(layers[-1].weight), nn.init.zeros_(layers[-1].bias)  # type: ignore[arg-type]
            self.couplings.append(nn.Sequential(*layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithm of the density of rows."""
        kept, changed = x.split(self.sizes, -1)
        logarithm = -0.5 * math.log(2 * math.pi) * x.shape[-1]
        for network in self.couplings:
            shift, scale = network(kept).chunk(2, -1)
            scale = scale / (1 + scale.abs() / 7)
            kept, changed = changed * scale.exp() + shift, kept
            logarithm = logarithm + scale.sum(-1)
        return logarithm - (kept.square().sum(-1) + changed.square().sum(-1)) / 2


class Density(Problem):
    """The error is the mean negative logarithm of the density of rows that test, in nats."""

    def __init__(self, run: SurrogateRun) -> None:
        self.run, self.generator = run, np.random.default_rng(run.seed)
        self.draw = {"moons": moons, "patches": patches}[run.data_set]
        x = self.draw(self.generator, TEST_ROWS, False)
        self.mean, covariance = x.mean(0), np.cov(x.T)
        values, vectors = np.linalg.eigh(covariance)
        white, alone = vectors / values**0.5 @ vectors.T, np.diag(np.diag(covariance) ** -0.5)
        self.map = white if run.norm == "columns" else alone
        self.test = self.rows(TEST_ROWS, True)

    def rows(self, count: int, are_to_test: bool) -> Tensor:
        """Draw rows whose columns have mean 0 and variance 1; white columns are uncorrelated, too."""
        return torch.tensor((self.draw(self.generator, count, are_to_test) - self.mean) @ self.map).float()

    def model(self) -> nn.Module:
        torch.manual_seed(self.run.seed)
        norm = self.run.norm if self.run.norm in NORMS else "none"
        return RealNVP(len(self.mean), norm, self.run.start)

    def loss(self, model: nn.Module, optimizer: object) -> Tensor:
        """The same of rows that are drawn, whose units differ from those of the error by the map alone."""
        return -model(self.rows(ROWS, False)).mean()

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """Add the logarithm of the map's determinant."""
        model.eval()
        error = -model(self.test).double().mean().item() - np.linalg.slogdet(self.map)[1]
        model.train()
        return error


SURROGATES = kind_of(lambda run: Burgers(run) if run.data_set == "burgers" else Density(run))
ARMS = [
    *(Arm("none", optimizer, method) for optimizer, method in product(["adam", "soap"], ["none", "whitened"])),
    Arm("none", "muon", "none"),
]
#: Data set → optimizers, each with a setting that a practitioner would change first.
REMEDIES: dict[str, list[tuple[str, Mapping[str, Any]]]] = {
    # About 1.16 times as many steps take whitened SOAP's time.
    "burgers": [("adam", {"spectral_rate": 3.2}), ("soap", {"longer": 1.16}), ("soap", {"longer": 1.5})],
    "moons": [("adam", {"norm": "layernorm"}), ("adam", {"start": "zero"})],
    "patches": [
        ("adam", {"norm": "layernorm"}), ("adam", {"norm": "columns"}), ("adam", {"longer": 2}),
        ("adam", {"start": "zero"}),
    ],
}  # fmt: skip
STARTS = {"adam": 1e-2, "soap": 3.2e-3, "muon": 1e-2}


#: What rows call the settings of remedies.
_WORDS = {
    "spectral_rate": "modes at {} times its rate", "start": "couplings begin as the identity",
    "longer": "{} times the steps",
}  # fmt: skip


def _name(result: Result) -> str:
    """The row of a run."""
    s = result["settings"]
    return ", ".join([label(s), *(text.format(s[name]) for name, text in _WORDS.items() if name in s)])


def _cell(every: Sequence[Result]) -> Cell:
    """Of the runs with the learning rate that was chosen last."""
    settings = every[-1]["settings"]
    runs = [r for r in every if r["settings"]["lr"] == settings["lr"]]
    final = [*errors(runs).values()]
    more = {name: settings[name] for name in ("lr", "damping") if name in settings}
    more["ms"] = statistics.median(1000 * r["seconds"][-1] / r["steps"][-1] for r in runs)
    return ranged(min(final), statistics.median(final), max(final), ".3g", n=len(final), **more)


def report(store: Store, name: str, folder: Path) -> Sections:
    """A row for every arm, a column for every data set."""
    results = store.read()
    cells = {key: _cell(own) for key, own in grouped(results, lambda r: (_name(r), setting("data_set")(r))).items()}
    rows = {name: name for name, _ in cells}
    steps = min(r["settings"]["steps"] for r in results)
    caption = f"After {steps} steps, the median over seeds and their range. {machine(results[0]['environment'])}"
    return {name: Section([pivot(["arm"], rows, TITLES, cells), caption])}


@dataclass
class SurrogateOptions(Compared):
    """Options of this study; an arm with a damping has two trials more."""

    data_sets: tuple[str, ...] = tuple(TITLES)  # that are learned
    optimizers: tuple[str, ...] = ("adam", "soap", "muon")  # that learn them


def _run(options: SurrogateOptions, store: Store) -> None:
    check_known("data set", options.data_sets, TITLES)
    check_known("optimizer", options.optimizers, STARTS)
    check_length(store, unless="longer", steps=options.steps)
    shown = [{"seed": seed} for seed in range(1, options.seeds + 1)]
    for data_set in options.data_sets:
        remedies = [(Arm(each.get("norm", "none"), name, "none"), each) for name, each in REMEDIES[data_set]]
        for arm, change in [*((arm, {}) for arm in ARMS), *remedies]:
            if arm.optimizer in options.optimizers:
                steps = round(options.steps * change.get("longer", 1))
                like = SurrogateRun("", "none", data_set=data_set, steps=steps, **change)
                first = first_trial(like, arm, starts=STARTS)
                compete(first, options.trials + 2 * first.damped, SURROGATES, store, float, shown)


#: What one seed does not decide.
DECIDED = ("--data-sets moons --seeds 5", "--data-sets burgers --optimizers soap --seeds 5")
STUDIES = {
    "surrogates": Study(
        "a Fourier neural operator and RealNVP, by whitened optimizers and the plainest remedies", _run, report,
        SurrogateOptions(trials=5, seeds=1), smoke="--trials 1 --steps 2 --data-sets moons",
        makes=[Recipe(0.4, options=("", *DECIDED))], page="docs/results/fields.md",
    )
}  # fmt: skip
