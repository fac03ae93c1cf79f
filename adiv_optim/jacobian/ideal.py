"""The ideal update of any module, by least squares for maps that are known only by their effect on vectors."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from .._checks import check_count, check_not_negative
from ..rows.models import refuse_attached
from .gradients import BY_ITSELF
from .modules import Parts, jvp, pure, same_randomness


class IdealUpdate(NamedTuple):
    """The result of `ideal_update`.

    Args:
        step: parameter path → the tensor to add to the parameter.
        residual: distance from the optimum, |Jᵀ(g − Jθ) − λθ| / |Jᵀg|; conjugate gradients end it near machine
            precision times the condition of J.
        misfit: |g − Jθ| / |g|, the share of the update that the parameters cannot make, or the ridge holds back.
        ridge: λ.
        iterations: of conjugate gradients.
    """

    step: dict[str, Tensor]
    residual: float
    misfit: float
    ridge: float
    iterations: int


def ideal_update(
    module: nn.Module,
    inputs: Any,
    grad_output: Tensor,
    damping: float = 0.0,
    *,
    tolerance: float | None = None,
    max_iterations: int = 1000,
) -> IdealUpdate:
    r"""Return the parameter step whose effect on a module's output is −grad_output, as nearly as there is one.

    .. math:: \Delta\theta = -J^\top (J J^\top + \lambda I)^{-1} g, \qquad
              \lambda = \text{damping} \cdot \mathrm{tr}(J J^\top) / n,

    with :math:`J = \partial z / \partial\theta` over the whole batch and n the number of outputs. Where no step
    does it, this one is the least squares solution of least norm. For nn.Linear and a convolution with one group
    it is minus the gradient of `BatchIdeal(per_sample=False)`; grouped convolutions have one λ here and one per group
    there. J is never written down: conjugate gradients call torch.func.vjp (twice over for J itself), so any module
    that torch.func can differentiate has an ideal step, a whole network included.

    Args:
        module: any module; run in the mode it is in. Buffers, such as running statistics, are left alone, and
            every run draws the same random numbers.
        inputs: a tensor, or a tuple of arguments, for the module.
        grad_output: g, of the output's shape.
        damping: the ridge as a share of the mean diagonal of JJᵀ. Other than 0 it costs one vjp per output number.
        tolerance: the residual at which to stop; by default 10 × machine precision.
        max_iterations: of conjugate gradients; the result says how far they came.

    Returns:
        An `IdealUpdate`; add `step` to the parameters.

    Raises:
        ValueError: the module has no trainable parameter or has a correction attached, grad_output has not the
            output's shape, or damping is negative.
        TypeError: the module does not return one tensor.

    Example:
        >>> import torch
        >>> from adiv_optim import jacobian
        >>> module = torch.nn.Bilinear(2, 3, 4, bias=False)  # no closed form, and not linear in its two inputs
        >>> x, y, g = torch.randn(3, 2), torch.randn(3, 3), torch.randn(3, 4)
        >>> update = jacobian.ideal_update(module, (x, y), g)
        >>> before = module(x, y).detach()
        >>> module.weight.data += update.step["weight"]
        >>> torch.allclose(module(x, y) - before, -g, atol=1e-4)
        True
    """
    check_not_negative("ideal_update", damping=damping)
    refuse_attached("ideal_update", module, BY_ITSELF)
    trained, of = pure(module)
    if not trained:
        raise ValueError(f"ideal_update: {type(module).__name__} has no trainable parameter to step on.")
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    arguments = tuple(argument.detach() if isinstance(argument, Tensor) else argument for argument in arguments)

    def run(trained: Parts) -> Any:
        return of(trained, *arguments)

    with torch.no_grad(), same_randomness(module):
        output, pull_back = vjp(run, trained)[:2]  # a third comes only with has_aux
    if not isinstance(output, Tensor):
        raise TypeError(f"ideal_update: {type(module).__name__} returned {type(output).__name__}; it takes one tensor.")
    if grad_output.shape != output.shape:
        raise ValueError(
            f"ideal_update: grad_output has shape {tuple(grad_output.shape)}, but {type(module).__name__} returned "
            f"{tuple(output.shape)}; they must agree."
        )

    def forward(direction: Parts) -> Tensor:
        with same_randomness(module):
            return jvp(run, trained, direction)

    def adjoint(cotangent: Tensor) -> Parts:
        return pull_back(cotangent)[0]

    with torch.no_grad():
        if not output.numel():
            return IdealUpdate(adjoint(output), 0.0, 0.0, 0.0, 0)
        ridge = damping * _mean_diagonal(adjoint, output) if damping else 0.0
        solution, residual, misfit, iterations = least_squares(
            forward,
            adjoint,
            grad_output.detach().to(output.dtype),
            ridge,
            tolerance=tolerance,
            max_iterations=max_iterations,
        )
    step = {name: -part for name, part in solution.items()}
    return IdealUpdate(step, residual, misfit, ridge, iterations)


#: Unit vectors of the output whose products are in memory at once, each as large as the parameters.
_AT_ONCE = 64


def _mean_diagonal(adjoint: Callable[[Tensor], Parts], output: Tensor) -> float:
    """Return tr(JJᵀ) / n, the mean squared length of Jᵀe over the unit vectors e of the output."""

    def squared(number: Tensor) -> Tensor:
        unit = (torch.arange(output.numel(), device=output.device) == number).to(output.dtype).view(output.shape)
        return torch.stack([part.square().sum() for part in adjoint(unit).values()]).sum()

    return vmap(squared, chunk_size=_AT_ONCE)(torch.arange(output.numel(), device=output.device)).mean().item()


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
    Convergence is by the condition of J; where that is bad, rounding ends it long before `tolerance`, 10 × machine
    precision by default. NaN and inf in g, `right`, travel into θ.

    Returns:
        θ; its residual |Jᵀ(g − Jθ) − λθ| / |Jᵀg|, which is 0 where it is optimal; its misfit |g − Jθ| / |g|, the
        share that no θ reaches or the ridge holds back; and the number of iterations.
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
        return {name: torch.full_like(part, math.nan) for name, part in solution.items()}, math.nan, math.nan, 0
    # Rounding can spoil a solution that has converged: the best is kept. The objective falls at every step until
    # rounding hides it; the gradient says more from there on.
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
