"""Isometry: how far the samples of a batch are from orthogonal and equally long; and the strength of activations."""

import torch
from torch import Tensor

from .._device import at_least_float32
from .activations import Activation, gaussian_moments

#: A duplicate whose first copy is projected out keeps, by rounding, at most so many ε of its squared length; measured
#: on x @ x.mT.
DUPLICATE_EPS = 16


def isometry(gram: Tensor) -> Tensor:
    r"""Compute how close a Gram matrix is to a multiple of the identity.

    .. math:: \mathcal{I}(G) = \det(G)^{1/n} / \left(\tfrac{1}{n} \operatorname{tr} G\right)

    Joudaki et al. 2023, Eq. 3: the volume the n samples span, against that of a cube of equal edges. 1 if they are
    orthogonal and equally long, 0 if they depend on each other linearly; scaling them all alike changes nothing.

    Args:
        gram: symmetric positive semi-definite matrices ⟨x_i, x_j⟩, such as `x @ x.mT`; the lower triangle is read.

    Returns:
        exp(−`isometry_gap`), in float32 at least: (..., n, n) → (...).

    Raises:
        ValueError: not square.

    Example:
        >>> import torch
        >>> from adiv_optim.diagnostics import isometry
        >>> x = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> round(isometry(x @ x.mT).item(), 6)  # √(9 · 1) / 5
        0.6
    """
    return torch.exp(-isometry_gap(gram))


def isometry_gap(gram: Tensor) -> Tensor:
    r"""Compute :math:`-\log \mathcal{I}(G)`: 0 for a multiple of the identity, infinite for a singular matrix.

    Joudaki et al. 2023, below Eq. 3. The determinant is that of a Cholesky factor, whose accuracy, unlike that of
    eigenvalues, does not suffer from samples of very different length. A matrix is singular (gap ∞, isometry 0, no
    gradient) if a sample keeps only |rest|² ≤ (n + 16) ε |x|² once those before it are projected out; ε is that of the
    dtype, float32 at least. NaN stays NaN.

    Args:
        gram: as for `isometry`. Prefer float64, in which fewer of them are singular.

    Returns:
        The gap, in float32 at least: (..., n, n) → (...).

    Raises:
        ValueError: not square.

    Example:
        >>> import torch
        >>> from adiv_optim.diagnostics import isometry_gap
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
        >>> isometry_gap(x @ x.mT), isometry_gap(x[:2] @ x[:2].mT)
        (tensor(inf), tensor(0.4055))
    """
    if gram.dim() < 2 or gram.shape[-1] != gram.shape[-2] or gram.is_complex():
        found = f"{tuple(gram.shape)} and {gram.dtype}"
        raise ValueError(f"gram has shape {found}; it must be (..., n, n) and real, as of x @ x.mT.")
    gram = at_least_float32(gram)
    finite = gram.isfinite().all(-1).all(-1)
    singular = finite & _is_singular(gram.detach())
    # Singular matrices leave before the factor that is differentiated: its backward would turn them into NaN.
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    regular = torch.where(singular[..., None, None], identity, gram)
    trace = regular.diagonal(dim1=-2, dim2=-1).mean(-1)
    factor, _ = torch.linalg.cholesky_ex(regular / trace[..., None, None])
    gap = -2 * factor.diagonal(dim1=-2, dim2=-1).log().mean(-1)
    return torch.where(singular, torch.inf, torch.where(finite, gap, torch.nan))


def _is_singular(gram: Tensor) -> Tensor:
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    factor, failed = torch.linalg.cholesky_ex(gram / diagonal.mean(-1)[..., None, None])
    rest = factor.diagonal(dim1=-2, dim2=-1).square()
    share = diagonal / diagonal.mean(-1, keepdim=True)
    noise = (gram.shape[-1] + DUPLICATE_EPS) * torch.finfo(gram.dtype).eps
    return (failed != 0) | (diagonal.mean(-1) <= 0) | ~(rest > noise * share).all(-1)


def isometry_strength(activation: Activation) -> float:
    r"""Compute how strongly an activation drives the samples of a batch apart.

    .. math:: \beta_\sigma = 2 - \frac{c_1^2}{\sum_{k \ge 1} c_k^2}
              = 2 - \frac{E[z\sigma(z)]^2}{\mathrm{Var}\,\sigma(z)}

    Joudaki et al. 2023, Def. 3: 1 for linear functions, 2 for those without a linear part. In a wide network of
    linear map, activation, centring, normalising, the gap at depth ℓ is at most
    :math:`4n \beta_\sigma^{-\ell} / \mathcal{I}(G^0)^n` (Thm. 4), and a small one shrinks by
    :math:`(2 - \beta_\sigma)^2` per layer.

    Args:
        activation: an elementwise module or function.

    Returns:
        β, in [1, 2].

    Raises:
        TypeError: not callable.
        ValueError: a constant function, or one that `gaussian_moments` refuses.

    Example:
        >>> import torch
        >>> from adiv_optim.diagnostics import isometry_strength
        >>> round(isometry_strength(torch.nn.ReLU()), 6)  # 2 − π / (2π − 2)
        1.266529
    """
    moments = gaussian_moments(activation)
    if moments.is_constant:
        raise ValueError(f"activation is the constant {moments.mean:g}: all samples become one, without a strength.")
    return 1 + moments.nonlinear / moments.variance
