"""The two structural forms, for rows and for patches alike."""

import math

import torch
from torch import Tensor

from .._checks import check_finite, check_not_negative, given


def check_affine_like(name: str, alpha: float, beta: float) -> None:
    """Refuse settings for which the affine-like form has no meaning."""
    _check_alpha(name, alpha)
    check_finite(name, beta=beta)
    if beta == 0:
        raise ValueError(
            f"{name}: beta is 0, which divides zeros by zero; use the norm-like form there (NormLikeLinear, "
            "form='norm-like')."
        )


def check_norm_like(name: str, alpha: float, beta: float | None, eps: float) -> None:
    """Refuse settings for which the norm-like form has no meaning."""
    _check_alpha(name, alpha)
    check_not_negative(name, eps=eps)
    check_finite(name, **given(beta=beta))
    if beta is not None and not -1 < beta < 1:
        raise ValueError(f"{name}: beta is {beta}; it must lie strictly between -1 and 1, or be None.")


def _check_alpha(name: str, alpha: float) -> None:
    check_finite(name, alpha=alpha)
    if alpha == 0:
        raise ValueError(f"{name}: alpha is 0, which cuts the input off; give it another value.")


def squared_length(input: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return |x|² along dimensions, which stay with size 1."""
    # Not by a norm, whose second derivative at 0 is NaN. And x·x has a cheaper backward than x.square().
    squares = (input * input.conj()).real if input.is_complex() else input * input
    return squares.sum(dim, keepdim=True)


def affine_like_scale(squared_norm: Tensor, alpha: float, beta: float) -> Tensor:
    """Return α / √(α²|x|² + β²), which multiplies Wx + (β/α) b: α is taken out of Eq. 37's bracket."""
    return alpha * torch.rsqrt(alpha**2 * squared_norm + beta**2)


def inverse_norm(squared_norm: Tensor, eps: float) -> Tensor:
    """Return 1 / max(|x|, eps), and 0 for x = 0: zeros stay zeros and pass no gradient."""
    return squared_norm.clamp(min=eps**2).masked_fill(squared_norm == 0, torch.inf).rsqrt()


def norm_like_factors(alpha: float, beta: float | None) -> tuple[float, float]:
    """Return the factors of W x/|x| and of b: Eq. 17, or Eq. 35 if `beta` is given."""
    if beta is None:
        return math.copysign(1, alpha), 1.0
    return math.copysign(math.sqrt(1 - beta**2), alpha), beta
