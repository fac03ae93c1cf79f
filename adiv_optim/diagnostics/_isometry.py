"""How far the samples of a batch are from orthogonal and equally long: isometry of Gram matrices, and its bound."""

from collections.abc import Sequence

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
    gram = _checked_gram(gram)
    finite = gram.isfinite().all(-1).all(-1)
    singular = finite & _is_singular(gram.detach())
    # Singular matrices leave before the factor that is differentiated: its backward would turn them into NaN.
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    regular = torch.where(singular[..., None, None], identity, gram)
    trace = regular.diagonal(dim1=-2, dim2=-1).mean(-1)
    factor, _ = torch.linalg.cholesky_ex(regular / trace[..., None, None])
    gap = -2 * factor.diagonal(dim1=-2, dim2=-1).log().mean(-1)
    return torch.where(singular, torch.inf, torch.where(finite, gap, torch.nan))


def _checked_gram(gram: Tensor) -> Tensor:
    if gram.dim() < 2 or gram.shape[-1] != gram.shape[-2] or gram.is_complex():
        found = f"{tuple(gram.shape)} and {gram.dtype}"
        raise ValueError(f"gram has shape {found}; it must be (..., n, n) and real, as of x @ x.mT.")
    return at_least_float32(gram)


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
    linear map, activation, centring, normalising, a small gap shrinks by a factor :math:`(2 - \beta_\sigma)^2` per
    layer; `mean_field_bound` bounds it from the start.

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


def mean_field_bound(gram: Tensor, strength: float, depths: int | Sequence[int] | Tensor) -> Tensor:
    r"""Bound the isometry gap of a wide random network by depth.

    .. math:: -\log \mathcal{I}(G^\ell) \le 2n \gamma(G^0) \beta_\sigma^{-\ell}, \qquad
              \gamma(G) = \max_{i \ne j} \frac{|\rho_{ij}|}{1 - |\rho_{ij}|}, \qquad
              \rho_{ij} = \frac{G_{ij}}{\sqrt{G_{ii} G_{jj}}}

    if the right-hand side is at most 1; otherwise the gap at depth 0, which is never exceeded. Joudaki et al.
    2023, Thm. A.2 and Lemma A.4; as γ(G) ≤ 2 exp(−n log I(G)) it implies Thm. 4, the bound
    :math:`\exp(-\ell \log\beta_\sigma - n \log\mathcal{I}(G^0) + \log 4n)`. It holds in the limit of infinite width
    for linear layers with weights N(0, 1/fan_in), each followed by the activation, centring and normalising; at
    finite width the gap levels off at order n / width. A small gap shrinks faster: by (2 − β)² per layer.

    Args:
        gram: of the samples at depth 0, which are taken as normalised to one length.
        strength: β of the activation, from `isometry_strength`.
        depths: numbers of layers ℓ.

    Returns:
        The bound, of shape (..., *depths) for gram (..., n, n) and depths of any shape.

    Raises:
        ValueError: not square, or a strength outside [1, 2].

    Example:
        >>> import torch
        >>> from adiv_optim.diagnostics import isometry_strength, mean_field_bound
        >>> gram = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        >>> mean_field_bound(gram, isometry_strength(torch.relu), [0, 10, 20, 30])
        tensor([0.1438, 0.1438, 0.0355, 0.0033])
    """
    if not 1 <= strength <= 2:
        raise ValueError(f"strength is {strength}; it must lie in [1, 2], as isometry_strength gives it.")
    gram = _checked_gram(gram)
    length = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    correlation = gram / (length.unsqueeze(-1) * length.unsqueeze(-2))
    largest = correlation.tril(-1).abs().flatten(-2).amax(-1)
    distance = 1 - largest
    gamma = torch.where(distance > DUPLICATE_EPS * torch.finfo(gram.dtype).eps, largest / distance, torch.inf)
    depths = torch.as_tensor(depths, device=gram.device)
    start = isometry_gap(correlation)
    batch = (*start.shape, *[1] * depths.dim())
    bound = 2 * gram.shape[-1] * gamma.view(batch) * strength ** -depths.to(gram.dtype)
    return torch.where(bound <= 1, bound.minimum(start.view(batch)), start.view(batch))
