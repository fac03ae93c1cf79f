"""Differential equations solved by a network of coordinates, in float64; a residual serves a point and a batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.fft import dct, idct
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from adiv_optim.jacobian import derivatives

from ..optimizers import STEPS_PER_DRAW
from ..train import DERIVATIVES, FieldRun, Problem, carried, kind_of, perceptron, xavier

#: Points inside → on the sides.
POINTS = {300: 60, 600: 100, 1200: 200, 2000: 400}
#: Of an equation with an unknown: observations, their noise in units of their root mean square, and their weight.
OBSERVATIONS, NOISE, WEIGHT = 200, 0.01, 1.0
#: Where the search for an unknown begins.
UNKNOWN = 0.5
#: Cosines of the reference for Allen and Cahn's equation; twice as many change it by 1.3·10⁻⁷ (relative L2).
MODES = 1024


class Fields(NamedTuple):
    """The m fields of a network at points, with their derivatives."""

    x: Tensor  # (…, d)
    u: Tensor  # (…, m)
    first: Tensor  # (…, m, d)
    second: Tensor  # (…, m): the sum of second derivatives by an equation's weights
    unknown: Tensor  # a number that is learned with the fields, or 0


class Side(NamedTuple):
    """Points with one value of a coordinate. There the fields are given, or the slope along that coordinate is 0."""

    coordinate: int
    value: float
    is_slope: bool = False


class Equation(NamedTuple):
    """An equation whose solution is known."""

    label: str
    solution: Callable[[Tensor], Tensor]  # points (…, d) → fields (…, m)
    domain: Sequence[tuple[float, float]]  # from where to where, of every coordinate
    sides: Sequence[Side]
    residual: Callable[[Fields], Tensor]  # → (…), or (…, k) of k equations
    weights: Sequence[float]  # of the second derivatives in their sum
    factor: float = 1.0  # of errors on the sides
    measured: int | None = None  # the error is of so many fields, the first; None is all
    unknown: float | None = None  # a number to be learned from observations, which are in place of sides


def box(*domain: tuple[float, float]) -> list[Side]:
    """All sides of a domain."""
    return [Side(coordinate, value) for coordinate, ends in enumerate(domain) for value in ends]


def _front(points: Tensor) -> Tensor:
    return 1 - ((points[..., :1] - points[..., 1:]) / 0.1).tanh()


def _logistic(points: Tensor) -> Tensor:
    height = (8 * (points[..., :1] / math.pi - 1).square()).expm1()  # 1/h − 1 for h = e^(−8(x/π − 1)²) at t = 0
    return (5 * points[..., 1:] - height.log()).sigmoid()


@cache
def _cosines(modes: int) -> Callable[[np.ndarray], np.ndarray]:
    """Times → coefficients (modes, times) of cos πkx, which solve Allen and Cahn's equation."""
    x = (np.arange(modes) + 0.5) / modes  # the equation is even in x, and so are all cosines
    decay = 1e-4 * (np.pi * np.arange(modes)) ** 2

    def change(t: float, coefficients: np.ndarray) -> np.ndarray:
        u = idct(coefficients, norm="forward")
        return dct(5 * (u - u**3), norm="forward") - decay * coefficients

    start = dct(x**2 * np.cos(np.pi * x), norm="forward")
    return solve_ivp(change, (0, 1), start, "DOP853", dense_output=True, rtol=1e-11, atol=1e-13).sol


def _allen_cahn(points: Tensor) -> Tensor:
    x, t = points.reshape(-1, 2).numpy().T
    coefficients = _cosines(MODES)(t)
    coefficients[1:] *= 2
    u = np.einsum("kn,kn->n", coefficients, np.cos(np.pi * np.arange(MODES)[:, None] * x))
    return torch.from_numpy(u).view(*points.shape[:-1], 1)


def _soliton(points: Tensor) -> Tensor:
    s = (points[..., 0] - 4 * points[..., 1] + 2).cosh().reciprocal().square()
    return torch.stack([2 * s, 8 * s - 12 * s.square()], -1)


def _korteweg_de_vries(at: Fields) -> Tensor:
    # The second field is ∂²u/∂x², so that no third derivative is taken.
    moved = at.first[..., 0, 1] + 6 * at.u[..., 0] * at.first[..., 0, 0] + at.first[..., 1, 0]
    return torch.stack([moved, at.u[..., 1] - at.second[..., 0]], -1)


_RATE = 10 - math.sqrt(100 + 4 * math.pi**2)


def _kovasznay(points: Tensor) -> Tensor:
    decay, turn = (_RATE * points[..., 0]).exp(), 2 * math.pi * points[..., 1]
    across = _RATE / (2 * math.pi) * decay * turn.sin()
    return torch.stack([1 - decay * turn.cos(), across, (1 - decay.square()) / 2], -1)


def _navier_stokes(at: Fields) -> Tensor:
    carried_along = (at.first[..., :2, :] * at.u[..., None, :2]).sum(-1)
    momentum = carried_along + at.first[..., 2, :] - at.second[..., :2]
    divergence = at.first[..., 0, :1] + at.first[..., 1, 1:]
    return torch.cat([momentum, divergence], -1)


def _string(points: Tensor) -> Tensor:
    x, t = math.pi * points[..., :1], 2 * math.pi * points[..., 1:]
    return x.sin() * t.cos() + (4 * x).sin() * (4 * t).cos() / 2


_UNIT, _AROUND_0, _CIRCLE = (0.0, 1.0), (-1.0, 1.0), (0.0, 2 * math.pi)
_START, _LEFT, _RIGHT = Side(1, 0.0), Side(0, -1.0), Side(0, 1.0)
#: Nonlinear ones first; coordinates are (x, t), or those of space.
EQUATIONS = {
    "burgers": Equation(
        "Burgers: ∂u/∂t + u ∂u/∂x = 0.05 ∂²u/∂x², a travelling front", _front, (_AROUND_0, _UNIT),
        (_LEFT, _RIGHT, _START),
        lambda at: at.first[..., 0, 1] + at.u[..., 0] * at.first[..., 0, 0] - at.second[..., 0],
        (0.05, 0.0), factor=10.0,
    ),
    "reaction": Equation(
        "Reaction: ∂u/∂t = 5u(1 − u) from a Gaussian", _logistic, (_CIRCLE, _UNIT), (_START,),
        lambda at: at.first[..., 0, 1] - 5 * at.u[..., 0] * (1 - at.u[..., 0]), (0.0, 0.0),
    ),
    "allen-cahn": Equation(
        "Allen–Cahn: ∂u/∂t = 10⁻⁴ ∂²u/∂x² + 5(u − u³) from x² cos πx", _allen_cahn, (_AROUND_0, _UNIT),
        (_START, _LEFT._replace(is_slope=True), _RIGHT._replace(is_slope=True)),
        lambda at: at.first[..., 0, 1] - at.second[..., 0] - 5 * (at.u - at.u**3)[..., 0], (1e-4, 0.0), factor=10.0,
    ),
    "korteweg-de-vries": Equation(
        "Korteweg–de Vries: ∂u/∂t + 6u ∂u/∂x + ∂³u/∂x³ = 0, a soliton", _soliton, ((-6.0, 6.0), _UNIT),
        (_START, Side(0, -6.0), Side(0, 6.0)), _korteweg_de_vries, (1.0, 0.0), measured=1,
    ),
    "kovasznay": Equation(
        "Navier–Stokes, steady: Kovasznay's flow behind a grid, Reynolds number 20", _kovasznay,
        ((-0.5, 1.0), (-0.5, 1.5)), box((-0.5, 1.0), (-0.5, 1.5)), _navier_stokes, (0.05, 0.05),
    ),
    "viscosity": Equation(
        "Burgers, inverse: the viscosity from 200 observations with 1 % of noise", _front, (_AROUND_0, _UNIT), (),
        lambda at: at.first[..., 0, 1] + at.u[..., 0] * at.first[..., 0, 0] - at.unknown * at.second[..., 0],
        (1.0, 0.0), factor=WEIGHT, unknown=0.05,
    ),
    "poisson": Equation(
        "Poisson in two dimensions: −Δu = 2π² sin πx sin πy", lambda x: (math.pi * x).sin().prod(-1, keepdim=True),
        (_UNIT, _UNIT), box(_UNIT, _UNIT),
        lambda at: at.second[..., 0] + 2 * math.pi**2 * (math.pi * at.x).sin().prod(-1), (1.0, 1.0),
    ),
    "poisson-5": Equation(
        "Poisson in five dimensions: −Δu = π² Σ cos πxₖ", lambda x: (math.pi * x).cos().sum(-1, keepdim=True),
        [_UNIT] * 5, box(*[_UNIT] * 5),
        lambda at: at.second[..., 0] + math.pi**2 * (math.pi * at.x).cos().sum(-1), [1.0] * 5,
    ),
    "heat": Equation(
        "Heat: ∂u/∂t = ¼ ∂²u/∂x² from sin πx",
        lambda x: (-0.25 * math.pi**2 * x[..., 1:]).exp() * (math.pi * x[..., :1]).sin(),
        (_UNIT, _UNIT), (Side(0, 0.0), _RIGHT, _START), lambda at: at.first[..., 0, 1] - at.second[..., 0], (0.25, 0.0),
    ),
    "helmholtz": Equation(
        "Helmholtz: Δu + u = (1 − 17π²) sin πx sin 4πy",
        lambda x: (math.pi * x[..., :1]).sin() * (4 * math.pi * x[..., 1:]).sin(), (_AROUND_0, _AROUND_0),
        box(_AROUND_0, _AROUND_0),
        lambda at: at.second[..., 0] + at.u[..., 0]
        - (1 - 17 * math.pi**2) * (math.pi * at.x[..., 0]).sin() * (4 * math.pi * at.x[..., 1]).sin(),
        (1.0, 1.0), factor=10.0,
    ),
    "wave": Equation(
        "Waves: ∂²u/∂t² = 4 ∂²u/∂x², two frequencies", _string, (_UNIT, _UNIT),
        (Side(0, 0.0), _RIGHT, _START, _START._replace(is_slope=True)), lambda at: at.second[..., 0], (-4.0, 1.0),
    ),
    "convection": Equation(
        "Convection: ∂u/∂t = −30 ∂u/∂x from sin x", lambda x: (x[..., :1] - 30 * x[..., 1:]).sin(), (_CIRCLE, _UNIT),
        (_START, Side(0, 0.0), Side(0, 2 * math.pi)), lambda at: at.first[..., 0, 1] + 30 * at.first[..., 0, 0],
        (0.0, 0.0),
    ),
}  # fmt: skip
#: When points are drawn: at every step, once, or now and then, for an optimizer that compares losses over steps.
ANEW, ONCE, NOW_AND_THEN = "anew", "once", f"every {STEPS_PER_DRAW}"
#: The first so many are nonlinear.
NONLINEAR = list(EQUATIONS)[:6]


@dataclass(frozen=True)
class EquationRun(FieldRun):
    """One network, by one seed."""

    lr: float | None = None  # some optimizers have none
    equation: str = "burgers"
    hidden: int = 50  # width of three hidden layers; or random features, of one
    inner: int = 300  # points inside
    draws: str = ANEW  # of points
    rows: str | None = None  # "derivatives": they count beside the inputs
    start: str | None = None  # Xavier's initialisation, with biases of 0; or "pytorch"

    known, positive = {"equation": EQUATIONS, "inner": POINTS}, ("hidden",)


class Batch(NamedTuple):
    """The points of a step."""

    inside: Tensor
    given: Tensor  # points whose fields are known
    values: Tensor
    flat: Tensor  # points where the slope along a coordinate is 0
    along: Tensor  # that coordinate


class Solver(Problem):
    """A tanh network that solves an equation."""

    def __init__(self, run: EquationRun) -> None:
        self.run, self.generator, self.equation = run, torch.Generator().manual_seed(run.seed), EQUATIONS[run.equation]
        self.low, self.high = torch.tensor(self.equation.domain, dtype=torch.float64).T
        self.test = self.draw(9000, torch.Generator().manual_seed(-1))
        self.truth = self.equation.solution(self.test)
        self.observed = None
        if self.equation.unknown:
            points = self.draw(OBSERVATIONS, self.generator)
            exact = self.equation.solution(points)
            noise = torch.randn(exact.shape, dtype=exact.dtype, generator=self.generator)
            self.observed = points, exact + NOISE * exact.square().mean().sqrt() * noise
        self.fixed = None if run.draws == ANEW else self._points()
        self.draws = 1

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw points of the domain."""
        drawn = torch.rand(count, len(self.low), dtype=torch.float64, generator=generator)
        return self.low + (self.high - self.low) * drawn

    def batch(self, steps: int = 0) -> Batch:
        """The points of the next step, or of the step that is under way where so many have begun."""
        if self.run.draws == NOW_AND_THEN and (steps - 1) // STEPS_PER_DRAW >= self.draws:
            self.fixed, self.draws = self._points(), self.draws + 1
        return self.fixed or self._points()

    def _points(self) -> Batch:
        inside, sides = (self.draw(n, self.generator) for n in (self.run.inner, POINTS[self.run.inner]))
        if self.observed:
            return Batch(inside, *self.observed, sides[:0], torch.zeros(0, dtype=torch.int64))
        turns = [self.equation.sides[k % len(self.equation.sides)] for k in range(len(sides))]
        along = torch.tensor([side.coordinate for side in turns])
        sides = sides.scatter(1, along[:, None], torch.tensor([[side.value] for side in turns], dtype=sides.dtype))
        is_slope = torch.tensor([side.is_slope for side in turns])
        given = sides[~is_slope]
        return Batch(inside, given, self.equation.solution(given), sides[is_slope], along[is_slope])

    def model(self) -> nn.Module:
        torch.manual_seed(self.run.seed)
        depth = 1 if self.run.optimizer == "random-features" else 3
        widths = (self.test.shape[-1], *[self.run.hidden] * depth, self.truth.shape[-1])
        model = nn.Sequential(*perceptron(widths, activation=nn.Tanh)).double()
        if self.run.start is None:
            xavier(model)
        if depth == 1:
            self._draw_features(model[0])
            nn.init.zeros_(list(model.parameters())[2])
        if self.equation.unknown:
            model.register_parameter("unknown", nn.Parameter(torch.tensor(UNKNOWN, dtype=torch.float64)))
        return model

    @torch.no_grad()
    def _draw_features(self, layer: Any) -> None:
        """Bends lie in the domain; slopes are in ±R, for a domain of length 2."""
        slopes = layer.weight.uniform_(-1, 1).mul_(2 * (self.run.lr or 1) / (self.high - self.low))
        layer.bias.copy_(-(slopes * self.draw(len(slopes), self.generator)).sum(1))
        layer.requires_grad_(False)

    def loss(self, model: nn.Module, optimizer: Any) -> Tensor:
        """Half the mean squares of the residual inside and, times a factor, of the errors on the sides."""
        equation, points = self.equation, self.batch(getattr(optimizer, "steps", 0))
        count = optimizer.count_rows if self.run.rows == DERIVATIVES else None
        fields = Fields(points.inside, *carried(model, points.inside, equation.weights, count), _unknown(model))
        parts = [equation.residual(fields), equation.factor * (model(points.given) - points.values)]
        if len(points.flat):
            parts.append(_slope(carried(model, points.flat, equation.weights)[1], points.along))
        return sum((part.square().mean() / 2 for part in parts), torch.zeros(()))

    def terms(self) -> list[Any]:
        """The same loss by its terms."""
        points, factor = self.batch(), self.equation.factor
        terms: list[Any] = [(self._inside, points.inside)]
        terms.append((lambda model, x, value: factor * (model(x) - value), points.given, points.values))
        if len(points.flat):
            terms.append((lambda model, x, k: _slope(derivatives(model, x).gradient, k), points.flat, points.along))
        return terms

    def _inside(self, model: nn.Module, point: Tensor) -> Tensor:
        u, first, second = derivatives(model, point)
        weights = second.new_tensor(self.equation.weights)
        return self.equation.residual(Fields(point, u, first, second @ weights, _unknown(model)))

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """The relative L2 error over 9,000 points; of an unknown, its relative error."""
        if self.equation.unknown:
            return abs(_unknown(model).item() / self.equation.unknown - 1)
        u, truth = (fields[:, : self.equation.measured] for fields in (model(self.test), self.truth))
        return ((u - truth).norm() / truth.norm()).item()


def _unknown(model: nn.Module) -> Tensor:
    return getattr(model, "unknown", torch.zeros((), dtype=torch.float64))


def _slope(first: Tensor, along: Tensor) -> Tensor:
    return first.gather(-1, along[..., None, None].expand(*first.shape[:-1], 1))


SOLVED = kind_of(Solver, pace=20)
