"""Square roots of covariance matrices, by eigenvalues or by matrix products alone."""

import math

import torch
from torch import Tensor

#: Up to this condition number float32 gives a root that is good to three digits, at half the price.
_MODERATE = 1e4

METHODS = ("eigh", "newton-schulz")


def roots(matrix: Tensor, ridge: Tensor, method: str = "eigh", condition: float = 1e6) -> tuple[Tensor, Tensor]:
    r"""Both roots of A + λI: :math:`(A + \lambda I)^{-1/2}` and :math:`(A + \lambda I)^{1/2}`.

    "eigh" takes eigenvalues. "newton-schulz" is the coupled iteration

    .. math:: T = \tfrac12 (3I - Z Y), \quad Y \leftarrow Y T, \quad Z \leftarrow T Z, \qquad
              Y_0 = (A + \lambda I) / c, \quad Z_0 = I

    (Higham, *Functions of Matrices*, Eq. 6.35), three matrix products each time; Y goes to the root and Z to its
    inverse. Up to a condition number of 1e4 both work in the matrix's own precision, beyond in float64.

    Rounding limits how good the inverse root R can be: with d = 256 in float32, entries of R R (A + λI) − I reach
    1e-6 at condition number 1e3 and 2e-4 at 1e6, all of it from rounding R to float32; in float64 1e-10.

    Args:
        matrix: A, symmetric and positive semidefinite, shape (…, d, d), float32 or float64.
        ridge: λ > 0, shape (…).
        method: "eigh" or "newton-schulz".
        condition: an upper bound of the condition number of A + λI, which fixes the number of iterations.

    Returns:
        Inverse root and root, each of shape (…, d, d).

    Example:
        >>> import torch
        >>> inverse, root = roots(torch.tensor([[3.0, 0.0], [0.0, 8.0]]), torch.tensor(1.0))
        >>> inverse.diagonal(), root.diagonal()
        (tensor([0.5000, 0.3333]), tensor([2., 3.]))
    """
    work = torch.float64 if condition > _MODERATE else matrix.dtype
    if method == "eigh":
        values, vectors = torch.linalg.eigh(matrix.to(work))
        values = (values.clamp_min(0) + ridge[..., None].to(work)).sqrt()
        both = ((vectors * scale[..., None, :]) @ vectors.mT for scale in (1 / values, values))
        inverse, root = (part.to(matrix.dtype) for part in both)
        return inverse, root
    identity = torch.eye(matrix.shape[-1], dtype=work, device=matrix.device)
    root = matrix.to(work) + ridge[..., None, None].to(work) * identity
    scale = torch.linalg.matrix_norm(root)[..., None, None]
    root, inverse = root / scale, identity.expand_as(root)
    # An eigenvalue far below 1 grows by 9/4 each time; near 1 convergence is quadratic.
    for _ in range(math.ceil(math.log(condition * matrix.shape[-1] ** 0.5) / math.log(2.25)) + 6):
        step = 1.5 * identity - 0.5 * inverse @ root
        root, inverse = root @ step, step @ inverse
    return (inverse / scale.sqrt()).to(matrix.dtype), (root * scale.sqrt()).to(matrix.dtype)
