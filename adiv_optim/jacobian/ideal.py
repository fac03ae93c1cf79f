"""The ideal update of any module, from the Jacobian of its outputs over the whole batch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp

from .._checks import check_not_negative
from .._device import at_least_float32
from ..rows.models import refuse_attached
from .modules import DETACH_FIRST, Parameters, pure, refuse_overlaps, same_randomness


@torch.no_grad()
def ideal_update(module: nn.Module, inputs: Any, grad_output: Tensor, damping: float = 0.0) -> Parameters:
    r"""Return the parameter step whose effect on a module's output is −grad_output, as nearly as possible.

    .. math:: \Delta\theta = -J^\top (J J^\top + \lambda I)^{-1} g, \qquad
              \lambda = \text{damping} \cdot \mathrm{tr}(J J^\top) / n,

    with :math:`J = \partial z / \partial\theta` over the whole batch and n the number of outputs. If no step does it
    exactly, this is the least squares solution of least norm, from the singular values of J. For nn.Linear and a
    convolution with one group it is minus the gradient of `BatchIdeal(per_sample=False)` with the same damping, up to
    its least ridge; grouped convolutions have one λ here and one per group there. Any module that torch.func can
    differentiate has an ideal step, a whole network included. J is dense, outputs × parameters, with a backward pass
    for each row.

    Args:
        module: any module; run once, in the mode it is in. Buffers, such as running statistics, and the random
            generators are left as they are.
        inputs: a tensor, or a tuple of arguments, for the module.
        grad_output: g, of the output's shape.
        damping: the ridge as a share of the mean diagonal of JJᵀ.

    Returns:
        Parameter path → the tensor to add to the parameter.

    Raises:
        ValueError: the module has no trainable parameter or has a correction attached, grad_output has not the
            output's shape, damping is negative, or the Jacobian is not finite.
        TypeError: the module does not return one tensor.

    Example:
        >>> import torch
        >>> from adiv_optim import jacobian
        >>> module = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4)).double()
        >>> x, g = torch.randn(3, 6).double(), torch.randn(3, 4).double()
        >>> step, before = jacobian.ideal_update(module, x, g), module(x).detach()
        >>> for name, parameter in module.named_parameters():
        ...     parameter.data += 1e-6 * step[name]
        >>> torch.allclose((module(x) - before) / 1e-6, -g, atol=1e-3)
        True
    """
    check_not_negative("ideal_update", damping=damping)
    refuse_attached("ideal_update", module, DETACH_FIRST)
    trained, run = pure(module)
    if not trained:
        raise ValueError(f"ideal_update: {type(module).__name__} has no trainable parameter to step on.")
    refuse_overlaps("ideal_update", dict(module.named_parameters()))
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    if any(parameter.is_complex() for parameter in trained.values()):
        raise ValueError(f"ideal_update: {type(module).__name__} is complex, and has no real Jacobian.")
    with torch.enable_grad(), same_randomness(module):  # without gradients an LSTM saves too little for a backward pass
        output, pull_back = vjp(lambda trained: run(trained, *arguments), trained)[:2]  # without has_aux there are two
    if not isinstance(output, Tensor):
        raise TypeError(f"ideal_update: {type(module).__name__} returned {type(output).__name__}; it takes one tensor.")
    if grad_output.shape != output.shape:
        raise ValueError(
            f"ideal_update: grad_output has shape {tuple(grad_output.shape)}, but {type(module).__name__} returned "
            f"{tuple(output.shape)}; they must agree."
        )
    if not output.numel():
        return {name: torch.zeros_like(part) for name, part in trained.items()}

    unit_vectors = torch.eye(output.numel(), dtype=output.dtype, device=output.device).view(-1, *output.shape)
    # Row by row: torch has no vmap rule for some operations.
    rows = [torch.cat([part.flatten() for part in pull_back(unit)[0].values()]) for unit in unit_vectors]
    jacobian = at_least_float32(torch.stack(rows))
    if not jacobian.isfinite().all():
        raise ValueError(f"ideal_update: the Jacobian of {type(module).__name__} has NaN or inf at these inputs.")
    left, singular, right = torch.linalg.svd(jacobian, full_matrices=False)
    ridge = damping * singular.square().sum() / output.numel()
    cutoff = max(jacobian.shape) * torch.finfo(singular.dtype).eps * singular[0]
    inverse = torch.where(singular > cutoff, 1 / (singular + ridge / singular), 0.0)
    g = grad_output.detach().to(jacobian.dtype).flatten()
    solution = right.mH @ (inverse * (left.mH @ g))
    parts = solution.split([parameter.numel() for parameter in trained.values()])
    return {name: -part.view_as(p).to(p.dtype) for (name, p), part in zip(trained.items(), parts, strict=True)}
