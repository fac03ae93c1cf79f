"""Damped least squares by conjugate gradients, for maps that are known only by what they do to vectors."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Several tensors that together are one vector.
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Solution:
    """The result of `least_squares`, per problem."""

    parts: Parts  # θ
    residual: Tensor  # |Jᵀ(g − Jθ) − λθ| / |Jᵀg|: how far θ is from optimal; 0 is exact
    misfit: Tensor  # |g − Jθ| / |g|: what no θ could reach or the ridge held back
    iterations: int


def least_squares(
    forward: Callable[[Parts], Tensor],
    adjoint: Callable[[Tensor], Parts],
    right: Tensor,
    ridge: Tensor | float = 0.0,
    *,
    batch_dims: int = 0,
    tolerance: float | None = None,
    max_iterations: int = 1000,
) -> Solution:
    r"""Minimise :math:`|J\theta - g|^2 + \lambda |\theta|^2` without ever writing J down (CGLS).

    Conjugate gradients on the normal equations, with the residual g − Jθ carried along instead of JᵀJ formed:
    the solution :math:`J^\top (J J^\top + \lambda I)^{-1} g`, and for λ = 0 the least squares solution of
    least norm, also where g is out of J's reach (Hestenes and Stiefel 1952; Björck 1996, section 7.4).
    Convergence is by the condition of J: rounding ends it long before `tolerance` where that is bad.

    The first `batch_dims` dimensions of g, `right`, and of θ's tensors count independent problems, solved side by side
    until the residual of each is at most `tolerance`, 10 × machine precision by default. NaN and inf in g travel
    into θ.
    """
    if not max_iterations >= 1:
        raise ValueError(f"least_squares: max_iterations is {max_iterations}; at least one is needed.")
    tolerance = 10 * torch.finfo(right.dtype).eps if tolerance is None else tolerance
    ridge = torch.as_tensor(ridge, dtype=right.dtype, device=right.device)

    def spread(scalar: Tensor, like: Tensor) -> Tensor:
        return scalar.reshape(*scalar.shape, *[1] * (like.dim() - scalar.dim()))

    def squared(tensor: Tensor) -> Tensor:
        return tensor.flatten(batch_dims).square().sum(-1) if tensor.dim() > batch_dims else tensor.square()

    def total(parts: Parts) -> Tensor:
        return torch.stack([squared(part) for part in parts.values()]).sum(0)

    def add(left: Parts, scalar: Tensor, right: Parts) -> Parts:
        return {name: left[name] + spread(scalar, part) * part for name, part in right.items()}

    def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
        # 0/0 is a problem already solved. Where only the denominator underflows nothing is left to gain either.
        return torch.where(denominator == 0, torch.zeros_like(numerator), numerator / denominator)

    # Squares of small numbers underflow: solve for a right-hand side of greatest entry 1.
    peak = right.abs().flatten(batch_dims).amax(-1) if right.dim() > batch_dims else right.abs()
    peak = torch.where((peak > 0) & peak.isfinite(), peak, 1)
    right = right / spread(peak, right)
    residual = right
    gradient = adjoint(residual)
    solution = {name: torch.zeros_like(part) for name, part in gradient.items()}
    direction, gamma = gradient, total(gradient)
    start, goal, iterations = gamma, tolerance**2, 0
    # Steps go on for the slowest problem and can spoil those that have converged: the best of each is kept. The
    # objective falls at every step until rounding hides it; the gradient says more from there on.
    best, best_gamma, best_objective = solution, gamma, squared(residual)
    visible = 1 - math.sqrt(torch.finfo(right.dtype).eps)
    while iterations < max_iterations and bool((gamma > goal * start).any()):
        moved = forward(direction)
        step = ratio(gamma, squared(moved) + ridge * total(direction))
        solution = add(solution, step, direction)
        residual = residual - spread(step, moved) * moved
        gradient = add(adjoint(residual), -ridge.expand_as(gamma), solution)
        previous, gamma = gamma, total(gradient)
        direction = add(gradient, ratio(gamma, previous), direction)
        iterations += 1
        objective = squared(residual) + ridge * total(solution)
        better = (gamma < best_gamma) | (objective < visible * best_objective)
        best = {name: torch.where(spread(better, part), part, best[name]) for name, part in solution.items()}
        best_gamma = torch.where(better, gamma, best_gamma)
        best_objective = torch.where(better, objective, best_objective)
    # A problem that holds NaN or inf compares as converged; it must not read as solved.
    finite = start.isfinite()
    solution = {name: torch.where(spread(finite, part), part, math.nan) for name, part in best.items()}
    best_gamma = torch.where(finite, best_gamma, math.nan)
    misfit = ratio(squared(right - forward(solution)), squared(right)).sqrt()
    solution = {name: spread(peak, part) * part for name, part in solution.items()}
    return Solution(solution, ratio(best_gamma, start).sqrt(), misfit, iterations)
