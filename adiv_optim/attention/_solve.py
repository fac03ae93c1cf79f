"""Solving for the parameter step that moves the logits by their own gradient."""

import math

import torch
from torch import Tensor

from .._linalg.least_squares import Parts, least_squares
from ..functional.shared import without_autocast
from ._map import LogitMap
from ._rule import AttentionIdeal

#: The largest number of logits in one problem for which JJᵀ is written down, and of its entries in all problems:
#: beyond, some dozens of iterations take less time than the factors.
DENSE_LOGITS = 256
DENSE_ENTRIES = 2**20


def solve(logit_map: LogitMap, right: Tensor, rule: AttentionIdeal) -> Parts:
    """Return θ = Jᵀ(JJᵀ + λI)⁻¹g with λ = damping · tr(JJᵀ) / logits; NaN and inf in g, `right`, travel."""
    count = math.prod(right.shape[-3:])
    definite = rule.damping >= count * torch.finfo(right.dtype).eps
    with without_autocast(right.device.type):
        if right.numel() == 0:
            return logit_map.adjoint(right)
        if definite and count <= DENSE_LOGITS and math.prod(right.shape[:2]) * count**2 <= DENSE_ENTRIES:
            return dense(logit_map, right, rule.damping)
        # Each iterate of conjugate gradients is the optimum of a subspace that grows: gᵀJθ ≥ 0 wherever they stop.
        return least_squares(
            logit_map.forward,
            logit_map.adjoint,
            right,
            rule.damping * logit_map.mean_eigenvalue() if rule.damping else 0.0,
            batch_dims=2,
            tolerance=rule.tolerance,
            max_iterations=rule.max_iterations,
        ).parts


def dense(logit_map: LogitMap, right: Tensor, damping: float) -> Parts:
    """Write JJᵀ down and factor JJᵀ + λI by Cholesky: the sixth power of tokens, but for few of them one call."""
    count = math.prod(right.shape[-3:])
    kernel = right.new_zeros(())
    for side, columns in logit_map.columns.items():
        own, others = logit_map.by_sequence(columns), logit_map.others[side]
        # Logit (i, j) of sequence m meets (k, l) of n by ⟨x~_i, x~_k⟩ ⟨k_j, k_l⟩, and by ⟨x~_j, x~_l⟩ ⟨q_i, q_k⟩.
        first = torch.einsum("pmic,pnkc->pmink", own, own)
        second = torch.einsum("phmjd,phnld->phmjnl", others, others)
        order = "phmijnkl" if side == "q" else "phmjinlk"
        kernel = kernel + torch.einsum(f"pmink,phmjnl->{order}", first, second)
    kernel = logit_map.scale**2 * kernel.reshape(*right.shape[:2], count, count)
    if logit_map.kept is not None:
        kept = logit_map.kept.flatten(2)
        kernel = kernel * (kept.unsqueeze(-1) & kept.unsqueeze(-2))
    # Where X is zero so is g's way to any parameter; the floor keeps its zero from being divided by zero.
    ridge = (damping * logit_map.mean_eigenvalue()).clamp(min=math.sqrt(torch.finfo(right.dtype).tiny))
    kernel = kernel + torch.diag_embed(ridge.unsqueeze(-1).expand(-1, -1, count))
    factor, failed = torch.linalg.cholesky_ex(kernel)
    # A partial factor looks like numbers; a training loop knows how to meet NaN.
    factor = torch.where(failed[..., None, None] == 0, factor, math.nan)
    dual = torch.cholesky_solve(right.flatten(2).unsqueeze(-1), factor)
    return logit_map.adjoint(dual.view_as(right))
