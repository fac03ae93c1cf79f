"""Gaussian moments and Hermite coefficients of an activation."""

from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from .quadrature import Activation, sample


class GaussianMoments(NamedTuple):
    r"""What centring and normalising by constants need to know of an activation, z being standard normal.

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

    By quadrature in float64: panels between the whole numbers, halved wherever that still changes the moments. Kinks
    and jumps are thereby found by themselves. A feature so narrow that no node falls on it (a spike of width 1e-3,
    say) is missed.

    Args:
        activation: an elementwise module or function, with whatever parameters it has now.

    Raises:
        TypeError: not callable.
        ValueError: not elementwise, random, not finite somewhere, or of infinite variance.

    Example:
        >>> import torch
        >>> from adiv_optim.diagnostics import gaussian_moments
        >>> found = gaussian_moments(torch.relu)
        >>> round(found.mean, 6), round(found.slope, 6), round(found.variance, 6)  # 1/√2π, 1/2, 1/2 − 1/2π
        (0.398942, 0.5, 0.340845)
    """
    found = sample(activation)
    constant, linear = islice(found.hermite(), 2)
    mean, slope = constant @ found.values, linear @ found.values
    # The rest itself, rather than E[σ²] − c₀² − c₁²: near a linear function those cancel.
    rest = found.values - mean * constant - slope * linear
    return GaussianMoments(mean.item(), slope.item(), rest.square().sum().item())


def hermite_coefficients(activation: Activation, degree: int) -> Tensor:
    r"""Expand an activation in normalised Hermite polynomials.

    .. math:: \sigma(z) = \sum_k c_k \frac{He_k(z)}{\sqrt{k!}}, \qquad
              c_k = \frac{1}{\sqrt{k!}} E_{z \sim N(0, 1)}[\sigma(z) He_k(z)]

    Joudaki et al. 2023, Def. 2. With this normalisation :math:`\sum_k c_k^2 = E[\sigma(z)^2]`.

    Args:
        activation: an elementwise module or function.
        degree: of the last coefficient.

    Shape:
        Output (degree + 1,), float64.

    Raises:
        TypeError: not callable.
        ValueError: `degree` is negative, or what `gaussian_moments` refuses.

    Example:
        >>> import torch
        >>> from adiv_optim.diagnostics import hermite_coefficients
        >>> [round(c, 6) for c in hermite_coefficients(torch.exp, 2).tolist()]  # √e / √k!
        [1.648721, 1.648721, 1.165822]
    """
    if degree < 0:
        raise ValueError(f"degree is {degree}; it is that of the last coefficient wanted and must be at least 0.")
    found = sample(activation, degree)
    return torch.stack([h @ found.values for h in islice(found.hermite(), degree + 1)])
