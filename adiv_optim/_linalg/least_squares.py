"""Damped least squares by conjugate gradients, for maps that are known only by what they do to vectors."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .limits import check_count

#: Several tensors that together are one vector.
Parts = dict[str, Tensor]


def least_squares(
    forward: Callable[[Parts], Tensor],
    adjoint: Callable[[Tensor], Parts],
    right: Tensor,
    ridge: float = 0.0,
    *,
    tolerance: float | None = None,
    max_iterations: int = 1000,
) -> tuple[Parts, float, float, int]:
    r"""Minimise :math:`|J\theta - g|^2 + \lambda |\theta|^2` without ever writing J down (CGLS).

    Conjugate gradients on the normal equations, with the residual g − Jθ carried along instead of JᵀJ formed:
    the solution :math:`J^\top (J J^\top + \lambda I)^{-1} g`, and for λ = 0 the least squares solution of
    least norm, also where g is out of J's reach (Hestenes and Stiefel 1952; Björck 1996, section 7.4).
    Convergence is by the condition of J: rounding ends it long before `tolerance`, 10 × machine precision by default,
    where that is bad. NaN and inf in g, `right`, travel into θ.

    Returns:
        θ; its residual |Jᵀ(g − Jθ) − λθ| / |Jᵀg|, which is 0 where it is optimal; its misfit |g − Jθ| / |g|, what no θ
        could reach or the ridge held back; and the number of iterations.
    """
    check_count("least_squares", max_iterations=max_iterations)
    tolerance = 10 * torch.finfo(right.dtype).eps if tolerance is None else tolerance

    def squared(parts: Parts) -> Tensor:
        return torch.stack([part.square().sum() for part in parts.values()]).sum()

    def add(left: Parts, scalar: Tensor | float, right: Parts) -> Parts:
        return {name: left[name] + scalar * part for name, part in right.items()}

    # Squares of small numbers underflow: solve for a right-hand side of greatest entry 1.
    peak = right.abs().max()
    peak = torch.where((peak > 0) & peak.isfinite(), peak, 1)
    residual = right = right / peak
    direction = gradient = adjoint(right)
    solution = {name: torch.zeros_like(part) for name, part in gradient.items()}
    start = gamma = squared(gradient)
    if not start.isfinite():
        return {n: torch.full_like(part, math.nan) for n, part in solution.items()}, math.nan, math.nan, 0
    # Rounding can spoil what has converged: the best is kept. The objective falls at every step until rounding hides
    # it; the gradient says more from there on.
    best, best_gamma, best_objective, iterations = solution, gamma, right.square().sum(), 0
    visible = 1 - math.sqrt(torch.finfo(right.dtype).eps)
    while iterations < max_iterations and gamma > tolerance**2 * start:
        moved = forward(direction)
        length = moved.square().sum() + ridge * squared(direction)
        if not length:  # it underflows: nothing is left to gain
            break
        solution = add(solution, gamma / length, direction)
        residual = residual - gamma / length * moved
        gradient = add(adjoint(residual), -ridge, solution)
        previous, gamma = gamma, squared(gradient)
        direction = add(gradient, gamma / previous, direction)
        iterations += 1
        objective = residual.square().sum() + ridge * squared(solution)
        if gamma < best_gamma or objective < visible * best_objective:
            best, best_gamma, best_objective = solution, gamma, objective
    misfit = (right - forward(best)).norm() / right.norm() if right.any() else right.norm()
    parts = {name: peak * part for name, part in best.items()}
    return parts, (best_gamma / start).sqrt().item() if start else 0.0, misfit.item(), iterations
