"""Activations under standard normal inputs: Gaussian moments and Hermite series, by quadrature."""

import copy
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]

#: Beyond this the normal density is below the least normal number of float64.
EDGE = 38
#: Above these relative errors of a moment a panel is halved, and the moments are refused.
PANEL_ERROR, TOTAL_ERROR = 1e-14, 1e-7
MAX_PANELS, MAX_HALVINGS = 2**14, 60

#: The Gauss–Legendre rule of 20 nodes on [-1, 1]: the positive ones, and their weights.
_POSITIVE = (
    (0.076526521133497334, 0.15275338713072585),
    (0.22778585114164508, 0.14917298647260375),
    (0.37370608871541956, 0.14209610931838205),
    (0.51086700195082710, 0.13168863844917663),
    (0.63605368072651503, 0.11819453196151842),
    (0.74633190646015079, 0.10193011981724044),
    (0.83911697182221882, 0.083276741576704749),
    (0.91223442825132591, 0.062672048334109064),
    (0.96397192727791379, 0.040601429800386941),
    (0.99312859918509492, 0.017614007139152118),
)
_HALF, _HALF_WEIGHTS = torch.tensor(_POSITIVE, dtype=torch.float64, device="cpu").unbind(1)
NODES, WEIGHTS = torch.cat([-_HALF, _HALF]), _HALF_WEIGHTS.repeat(2)


class GaussianMoments(NamedTuple):
    r"""The constants by which an activation is centred and normalised, z being standard normal.

    Args:
        mean: :math:`c_0 = E[\sigma(z)]`.
        slope: :math:`c_1 = E[z\sigma(z)]`, which is E[σ'(z)] as well.
        nonlinear: :math:`\sum_{k \ge 2} c_k^2`, the variance that no linear function of z explains.
    """

    mean: float
    slope: float
    nonlinear: float

    @property
    def variance(self) -> float:
        """Return Var σ(z), which is Σ_{k≥1} c_k²."""
        return self.slope**2 + self.nonlinear

    @property
    def is_constant(self) -> bool:
        """Whether the variance is no more than rounding leaves of a constant."""
        return self.variance <= 1e-24 * self.mean**2


def gaussian_moments(activation: Activation) -> GaussianMoments:
    r"""Compute mean, slope and nonlinear variance of an activation whose inputs are standard normal.

    Gauss–Legendre quadrature in float64 starts from unit intervals and bisects them while that changes the moments, as
    at kinks and jumps. It misses features narrower than the spacing of nodes (a spike of width 1e-3).

    Args:
        activation: an elementwise module or function, with the parameters that it has now.

    Returns:
        `GaussianMoments`.

    Raises:
        TypeError: not callable.
        ValueError: not elementwise, random, not finite somewhere, or of infinite variance.

    Example:
        >>> import torch
        >>> from adiv_optim.diagnostics import gaussian_moments
        >>> moments = gaussian_moments(torch.relu)
        >>> round(moments.mean, 6), round(moments.slope, 6), round(moments.variance, 6)  # 1/√2π, 1/2, 1/2 − 1/2π
        (0.398942, 0.5, 0.340845)
    """
    sampled = sample(activation)
    constant, linear = islice(sampled.hermite(), 2)
    mean, slope = constant @ sampled.values, linear @ sampled.values
    # The rest itself, rather than E[σ²] − c₀² − c₁²: near a linear function those cancel.
    rest = sampled.values - mean * constant - slope * linear
    return GaussianMoments(mean.item(), slope.item(), rest.square().sum().item())


def hermite_coefficients(activation: Activation, degree: int) -> Tensor:
    r"""Expand an activation in normalised Hermite polynomials.

    .. math:: \sigma(z) = \sum_k c_k \frac{He_k(z)}{\sqrt{k!}}, \qquad
              c_k = \frac{1}{\sqrt{k!}} E_{z \sim N(0, 1)}[\sigma(z) He_k(z)]

    Joudaki et al. 2023, Def. 2. With this normalisation :math:`\sum_k c_k^2 = E[\sigma(z)^2]`.

    Args:
        activation: an elementwise module or function.
        degree: of the last coefficient.

    Returns:
        Shape (degree + 1,), float64.

    Raises:
        TypeError: not callable.
        ValueError: `degree` is negative, or `gaussian_moments` refuses the activation.

    Example:
        >>> import torch
        >>> from adiv_optim.diagnostics import hermite_coefficients
        >>> [round(c, 6) for c in hermite_coefficients(torch.exp, 2).tolist()]  # √e / √k!
        [1.648721, 1.648721, 1.165822]
    """
    if not isinstance(degree, int) or degree < 0:
        raise ValueError(f"degree is {degree}; it is that of the last coefficient, a whole number from 0.")
    sampled = sample(activation, degree)
    return torch.stack([h @ sampled.values for h in islice(sampled.hermite(), degree + 1)])


class Sampled(NamedTuple):
    """An activation at quadrature nodes, times √weight: E[fg] is Σ (roots · f)(roots · g)."""

    nodes: Tensor  # z
    roots: Tensor  # √(weight · density at z)
    values: Tensor  # roots · σ(z)

    def hermite(self) -> Iterator[Tensor]:
        """Yield roots · He_k(z) / √k! for k = 0, 1, …, which stays bounded where He_k alone would overflow."""
        before, h, k = torch.zeros_like(self.roots), self.roots, 0
        while True:
            yield h
            k += 1
            before, h = h, (self.nodes * h - math.sqrt(k - 1) * before) / math.sqrt(k)


@torch.no_grad()
def sample(activation: Activation, degree: int = 1) -> Sampled:
    """Evaluate an activation on nodes that integrate its square, mean and one coefficient; see `gaussian_moments`."""
    if not callable(activation) or isinstance(activation, type):
        raise TypeError(f"activation is {activation!r}; pass an elementwise module or function, such as torch.relu.")
    name = repr(activation) if isinstance(activation, nn.Module) else getattr(activation, "__name__", "activation")
    if isinstance(activation, nn.Module):
        activation = copy.deepcopy(activation).to("cpu", torch.float64)
    cuts = torch.arange(-EDGE, EDGE + 1, dtype=torch.float64, device="cpu")
    edges = torch.stack([cuts[:-1], cuts[1:]], 1)
    _check_elementwise(activation, edges.flatten(), name)

    coarse = _evaluate(activation, edges, name)
    squares, _, _ = _integrals(coarse, degree)
    if squares[[0, -1]].max() > PANEL_ERROR * squares.sum():
        raise ValueError(f"{name} has no finite variance under a standard normal: it must grow slower than exp(z²/4).")
    size = squares.sum().clamp(min=torch.finfo(squares.dtype).tiny)
    sizes = torch.stack([size, size.sqrt(), size.sqrt()]).unsqueeze(1)
    accepted, missed = [], 0.0
    for halvings in range(1, MAX_HALVINGS + 1):
        middle = edges.mean(1, keepdim=True)
        edges = torch.cat([edges[:, :1], middle, middle, edges[:, 1:]], 1).view(-1, 2)
        fine = _evaluate(activation, edges, name)
        change = (_integrals(fine, degree).unflatten(1, (-1, 2)).sum(2) - _integrals(coarse, degree)).abs()
        change = (change / sizes).amax(0)
        unsettled = (change > PANEL_ERROR) & (halvings < MAX_HALVINGS) & (len(change) < MAX_PANELS)
        missed += change[~unsettled].sum().item()
        halves = unsettled.repeat_interleave(2)
        accepted.append([part[~halves].flatten() for part in fine])
        if not unsettled.any():
            break
        edges, coarse = edges[halves], Sampled(*(part[halves] for part in fine))
    if not missed <= TOTAL_ERROR:  # NaN included
        raise ValueError(
            f"the moments of {name} under a standard normal do not settle: its variance is infinite, or it is rougher "
            "than can be integrated; pass a function without infinitely many jumps."
        )
    return Sampled(*map(torch.cat, zip(*accepted, strict=True)))


def _evaluate(activation: Activation, edges: Tensor, name: str) -> Sampled:
    """Return the activation on the nodes of panels, a row each."""
    half = edges.diff(dim=1) / 2
    nodes = edges[:, :1] + half * (1 + NODES)
    roots = (half * WEIGHTS).sqrt() * torch.exp(-nodes.square() / 4) / math.tau**0.25
    # A copy, for an activation may work in place.
    values = activation(nodes.clone()).to(nodes.dtype)
    if not values.isfinite().all():
        z = nodes[~values.isfinite()][0]
        raise ValueError(f"{name} gives {activation(z[None]).item()} at z = {z:.6g}; it must be finite for every z.")
    return Sampled(nodes, roots, roots * values)


def _integrals(panels: Sampled, degree: int) -> Tensor:
    """Return E[σ²], E[σ] and c_degree, panel by panel: shape (3, panels)."""
    highest = next(islice(panels.hermite(), degree, None))
    factors = torch.stack([panels.values, panels.roots, highest])
    return (factors * panels.values).sum(-1)


def _check_elementwise(activation: Activation, nodes: Tensor, name: str) -> None:
    try:
        outputs, column = activation(nodes.clone()), activation(nodes[1::2, None].clone())
        by_itself = torch.allclose(outputs[1::2, None], column, rtol=1e-6, atol=1e-12, equal_nan=True)
    except Exception as error:
        raise ValueError(f"{name} is not an elementwise activation, for tensors of any shape: {error}.") from error
    if outputs.shape != nodes.shape or not by_itself:
        raise ValueError(
            f"{name} is not an elementwise activation: its output has another shape than its input, or depends for one "
            "number on the other numbers of the tensor, or on chance (then call .eval() first)."
        )
