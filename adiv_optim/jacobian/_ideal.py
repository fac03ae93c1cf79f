"""The ideal update of any module, matrix-free."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from .._linalg.least_squares import Parts, least_squares
from .._linalg.limits import check_not_negative, given
from ..attach.checks import refuse_attached
from .modules import jvp, pure, same_randomness
from .rows import BY_ITSELF


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
    ridge: float | None = None,
    tolerance: float | None = None,
    max_iterations: int = 1000,
    chunk_size: int = 64,
) -> IdealUpdate:
    r"""The parameter step whose effect on a module's output is −grad_output, as nearly as there is one.

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
        damping: the ridge as a share of the mean diagonal of JJᵀ. Other than 0 it costs one vjp per output
            number; give `ridge` to spare them.
        ridge: λ itself, in place of `damping`.
        tolerance: the residual at which to stop; by default 10 × machine precision.
        max_iterations: of conjugate gradients; the result says how far they came.
        chunk_size: vjps taken at once for the trace; memory is chunk_size × parameters.

    Returns:
        An `IdealUpdate`; add `step` to the parameters.

    Raises:
        ValueError: the module has no trainable parameter or has a correction attached, grad_output has not the
            output's shape, damping or ridge is negative or both are given.
        TypeError: the module does not return one tensor.

    Example:
        >>> import torch
        >>> from adiv_optim import jacobian
        >>> module = torch.nn.Bilinear(2, 3, 4, bias=False)  # no closed form, and not linear in its two inputs
        >>> x, y, g = torch.randn(3, 2), torch.randn(3, 3), torch.randn(3, 4)
        >>> found = jacobian.ideal_update(module, (x, y), g)
        >>> before = module(x, y).detach()
        >>> module.weight.data += found.step["weight"]
        >>> torch.allclose(module(x, y) - before, -g, atol=1e-4)
        True
    """
    check_not_negative("ideal_update", **given(damping=damping, ridge=ridge))
    if damping and ridge is not None:
        raise ValueError(f"ideal_update: damping={damping} and ridge={ridge} are two names of λ; give one of them.")
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
            return IdealUpdate(adjoint(output), 0.0, 0.0, ridge or 0.0, 0)
        if ridge is None:
            ridge = damping * _mean_diagonal(adjoint, output, chunk_size) if damping else 0.0
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


def _mean_diagonal(adjoint: Callable[[Tensor], Parts], output: Tensor, chunk_size: int) -> float:
    """tr(JJᵀ) / n: the squared length of Jᵀe, over every unit vector e of the output."""

    def squared(number: Tensor) -> Tensor:
        unit = (torch.arange(output.numel(), device=output.device) == number).to(output.dtype).view(output.shape)
        return torch.stack([part.square().sum() for part in adjoint(unit).values()]).sum()

    return vmap(squared, chunk_size=chunk_size)(torch.arange(output.numel(), device=output.device)).mean().item()
