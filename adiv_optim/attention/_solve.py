"""Solving for the parameter step that moves the logits as they should be moved."""

import math

import torch
from torch import Tensor

from .._linalg.least_squares import Parts, least_squares
from ._map import LogitMap

#: The largest number of logits in one problem for which JJᵀ is written down, and of its entries in all problems:
#: beyond, some dozens of iterations take less time than the factors.
DENSE_LOGITS = 256
DENSE_ENTRIES = 2**20


def solve(logit_map: LogitMap, right: Tensor, damping: float, tolerance: float | None, max_iterations: int) -> Parts:
    r"""Return :math:`\theta = J^\top (JJ^\top + \lambda I)^{-1} g`, λ = damping · tr(JJᵀ) / logits.

    Directly where damping is 0 and every logit can be reached, or where JJᵀ is small; by conjugate gradients
    elsewhere. All agree as far as they converge. NaN and inf in `right` travel.
    """
    if right.numel() == 0:
        return logit_map.adjoint(right)
    right = logit_map.masked(right)
    # Everything below is linear in g; its square must neither overflow nor vanish.
    size = right.abs().amax((-3, -2, -1), keepdim=True)
    size = torch.where(size == 0, torch.ones_like(size), size)
    parts = _solve(logit_map, right / size, damping, tolerance, max_iterations)
    return {side: part * size.squeeze(-1) for side, part in parts.items()}


def _solve(logit_map: LogitMap, right: Tensor, damping: float, tolerance: float | None, max_iterations: int) -> Parts:
    count = math.prod(right.shape[-3:])
    if damping == 0:
        found = reachable(logit_map, right)
        if found is not None:
            return found
    elif (
        damping >= count * torch.finfo(right.dtype).eps
        and count <= DENSE_LOGITS
        and math.prod(right.shape[:2]) * count**2 <= DENSE_ENTRIES
    ):
        return dense(logit_map, right, damping)
    return iterative(logit_map, right, damping, tolerance, max_iterations)


def reachable(logit_map: LogitMap, right: Tensor) -> Parts | None:
    r"""Return the undamped step of one sequence per problem, in O(tokens³), or None where there is none.

    :math:`s^2 (A v B + C v A) = g` with :math:`A = \tilde X \tilde X^\top = L L^\top`, :math:`B = KK^\top`,
    :math:`C = QQ^\top` becomes, for :math:`w = L^\top v L`, the Sylvester equation
    :math:`s^2 (w B' + C' w) = L^{-1} g L^{-\top}` with :math:`B' = L^{-1} B L^{-\top}` and C' likewise, whose
    eigenvectors make it diagonal. All logits can be reached if and only if L is invertible and B' and C' are not
    both singular: generically if tokens ≤ min(head_dim, columns of X~). There θ = Jᵀv is exact. Elsewhere least
    squares in these coordinates would not be least squares of the logits, and for the same reason there is no
    damping here: the term that would keep the equation diagonal, μ A v A, lets the step go uphill.
    """
    tokens = right.shape[-1]
    if logit_map.mask is not None or right.shape[2] != 1 or logit_map.sides != ["q", "k"]:
        return None
    columns = logit_map.columns("q")
    same = columns.shape == logit_map.columns("k").shape and ("q_weight" in logit_map.trained) == (
        "k_weight" in logit_map.trained
    )
    if not same or tokens > min(columns.shape[-1], logit_map.keys.shape[-1]):
        return None
    # L by QR: a Cholesky factor of A would square the condition of X~.
    factor = torch.linalg.qr(columns.mT).R.mT.unsqueeze(1)
    rounding = 10 * tokens * torch.finfo(right.dtype).eps
    pivots = factor.diagonal(dim1=-2, dim2=-1).abs()
    if not bool((pivots.amin(-1) > rounding * pivots.amax(-1)).all()):
        return None

    def whitened(tensor: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(factor, tensor, upper=False)

    queries, keys = whitened(logit_map.queries.squeeze(2)), whitened(logit_map.keys.squeeze(2))
    if not bool(queries.isfinite().all() & keys.isfinite().all()):
        return None
    left_values, left = torch.linalg.eigh(queries @ queries.mT)
    right_values, turned = torch.linalg.eigh(keys @ keys.mT)
    values = left_values.unsqueeze(-1) + right_values.unsqueeze(-2)
    if not bool((values.amin((-2, -1)) > rounding * values.amax((-2, -1))).all()):
        return None
    target = whitened(whitened(right.squeeze(2)).mT).mT
    solved = left @ ((left.mT @ target @ turned) / (logit_map.scale**2 * values)) @ turned.mT
    upper = factor.mT
    half = torch.linalg.solve_triangular(upper, solved, upper=True)
    dual = torch.linalg.solve_triangular(upper, half.mT, upper=True).mT
    return logit_map.adjoint(dual.unsqueeze(2))


def dense(logit_map: LogitMap, right: Tensor, damping: float) -> Parts:
    """Write JJᵀ down and factor JJᵀ + λI by Cholesky: the sixth power of tokens, but for few of them one call."""
    problems, heads, sequences, tokens, _ = right.shape
    count = sequences * tokens**2
    queries, keys = logit_map.queries.flatten(2, 3), logit_map.keys.flatten(2, 3)

    def pairs(first: Tensor, second: Tensor) -> Tensor:
        # (first ⊗ second) over logits of the same sequence: [m, i, j; n, k, l] = first[m, i; n, k] second[m, j; n, l].
        first, second = (
            gram.unflatten(-1, (sequences, tokens)).unflatten(-3, (sequences, tokens)) for gram in (first, second)
        )
        return first[..., :, :, None, :, :, None] * second[..., :, None, :, :, None, :]

    kernel = right.new_zeros(())
    for side in logit_map.sides:
        gram = (logit_map.columns(side) @ logit_map.columns(side).mT).unsqueeze(1)
        kernel = kernel + (pairs(gram, keys @ keys.mT) if side == "q" else pairs(queries @ queries.mT, gram))
    kernel = logit_map.scale**2 * kernel.reshape(problems, heads, count, count)
    if logit_map.mask is not None:
        kept = logit_map.mask.expand_as(right).flatten(2)
        kernel = kernel * (kept.unsqueeze(-1) & kept.unsqueeze(-2))
    # Where X is zero so is g's way to any parameter; the floor keeps its zero from being divided by zero.
    ridge = (damping * logit_map.mean_eigenvalue()).clamp(min=math.sqrt(torch.finfo(right.dtype).tiny))
    kernel = kernel + torch.diag_embed(ridge.unsqueeze(-1).expand(-1, -1, count))
    factor, failed = torch.linalg.cholesky_ex(kernel)
    # A partial factor looks like numbers; NaN is what the rest of a training loop knows how to meet.
    factor = torch.where(failed[..., None, None] == 0, factor, math.nan)
    dual = torch.cholesky_solve(right.flatten(2).unsqueeze(-1), factor)
    return logit_map.adjoint(dual.view_as(right))


def iterative(
    logit_map: LogitMap, right: Tensor, damping: float, tolerance: float | None, max_iterations: int
) -> Parts:
    """Conjugate gradients. Each iterate is the optimum of a subspace that grows, so gᵀJθ ≥ 0 wherever they stop."""
    return least_squares(
        logit_map.forward,
        logit_map.adjoint,
        right,
        damping * logit_map.mean_eigenvalue() if damping else 0.0,
        batch_dims=2,
        tolerance=tolerance,
        max_iterations=max_iterations,
    ).parts
