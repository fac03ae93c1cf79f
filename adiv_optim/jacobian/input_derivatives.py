"""First and second derivatives of a network by its input, at one point; carried forward with the value if possible."""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from .._checks import describe
from .modules import WrittenOut

_ELEMENTWISE = (
    nn.Tanh, nn.Sigmoid, nn.Identity, nn.GELU, nn.SiLU, nn.Softplus, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.ReLU,
    nn.LeakyReLU, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink,
)  # fmt: skip


class Derivatives(NamedTuple):
    """The result of `derivatives`, for a point with d coordinates and an output of shape S.

    Args:
        value: the output, of shape S.
        gradient: its first derivatives, of shape S + (d,).
        second: its second derivatives by each coordinate alone, ∂²/∂xₖ², of shape S + (d,).
    """

    value: Tensor
    gradient: Tensor
    second: Tensor


def derivatives(model: Callable[[Tensor], Tensor], x: Tensor) -> Derivatives:
    r"""Compute the value of a network at a point, its gradient, and its unmixed second derivatives.

    Through nn.Linear and elementwise activations all three are carried forward,

    .. math:: a' = \sigma'(z)\, z', \qquad a'' = \sigma''(z)\, z'^2 + \sigma'(z)\, z'',

    with :math:`z = Wa + b`, :math:`z' = Wa'` and :math:`z'' = Wa''`, in one pass of 2d + 1 rows; so a gradient by the
    parameters costs that of 2d + 1 points. Any other function is differentiated by torch.func, forward over forward,
    once for every coordinate, and needs forward-mode rules: attention has them within
    torch.nn.attention.sdpa_kernel(SDPBackend.MATH). torch's rules for det, slogdet, logdet, solve and its kin, batch
    norms of one batch, products by scatter_reduce, Householder products and Bessel functions are wrong in second
    derivatives, and its norms and std have no third ones: write such a function out.

    Args:
        model: nn.Sequential, nested too, of nn.Linear and Tanh, Sigmoid, Identity, GELU, SiLU, Softplus, Mish, ELU,
            CELU, SELU, ReLU, LeakyReLU, LogSigmoid, Softsign or Tanhshrink, without forward hooks or a forward set on
            one of them; or any module or function that maps a point to a tensor and that torch.func can differentiate,
            such as a network times a factor that is 0 on the boundary.
        x: the point, (d,). Map over several with torch.func.vmap.

    Returns:
        A `Derivatives`; for a model with m outputs its shapes are (m,), (m, d) and (m, d).

    Raises:
        ValueError: x is not one point.
        TypeError: the model is TorchScript's, which torch.func does not differentiate.

    Example:
        >>> import torch
        >>> from adiv_optim.jacobian import derivatives
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> x = torch.rand(2, dtype=torch.float64)
        >>> hessian = torch.func.hessian(model)(x)
        >>> torch.allclose(derivatives(model, x).second, hessian.diagonal(dim1=-2, dim2=-1))
        True
    """
    if not isinstance(x, Tensor) or x.dim() != 1:
        raise ValueError(
            f"derivatives: x is {describe(x)}; it is one point, (d,), as t[None] is of one coordinate. Map "
            "by torch.func.vmap."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("derivatives: torch.func cannot differentiate TorchScript; pass the module that was scripted.")
    if (layers := _known_layers(model)) is not None:
        return _carried_forward(layers, x)

    def function(x: Tensor) -> Tensor:
        return model(x.clone())  # a model in place writes here

    along = vmap(lambda direction: _twice_along(function, x, direction), out_dims=-1)
    with WrittenOut():
        return Derivatives(function(x), *along(torch.eye(len(x), dtype=x.dtype, device=x.device)))


def laplacian(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    r"""Sum a network's unmixed second derivatives at a point, :math:`\sum_k \partial^2 u / \partial x_k^2`.

    Args:
        model: as for `derivatives`.
        x: the point, (d,).

    Returns:
        A tensor of the output's shape.

    Raises:
        ValueError, TypeError: as `derivatives`.

    Example:
        >>> import torch
        >>> from adiv_optim.jacobian import laplacian
        >>> points = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> torch.func.vmap(lambda x: laplacian(lambda x: (x**3).sum(), x))(points)  # 6 (x + y)
        tensor([18., 42.])
    """
    return derivatives(model, x).second.sum(-1)


def _known_layers(model: Callable[[Tensor], Tensor]) -> list[nn.Module] | None:
    """List the linear layers and activations of a network, in their order; None if it has any other module."""
    overrides = ("forward", "_forward_hooks", "_forward_pre_hooks")  # which run only where the module itself is called
    if not isinstance(model, nn.Module) or any(vars(model).get(name) for name in overrides):
        return None
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        known = [layers for child in model if (layers := _known_layers(child)) is not None]
        return list(chain.from_iterable(known)) if len(known) == len(model) else None
    return [model] if type(model).forward is nn.Linear.forward or type(model) in _ELEMENTWISE else None


def _carried_forward(layers: list[nn.Module], x: Tensor) -> Derivatives:
    # One matrix: a row for the value, d for the first derivatives and d for the second ones.
    d = len(x)
    rows = torch.cat([x[None], torch.eye(d, dtype=x.dtype, device=x.device), x.new_zeros(d, d)])
    for layer in layers:
        if isinstance(layer, nn.Linear):
            rows = rows @ layer.weight.mT
            if layer.bias is not None:
                rows = torch.cat([rows[:1] + layer.bias, rows[1:]])
        else:
            a, slope, curvature = _activated(layer, rows[0])
            first, second = rows[1 : d + 1], rows[d + 1 :]
            rows = torch.cat([a[None], slope * first, curvature * first.square() + slope * second])
    return Derivatives(rows[0], rows[1 : d + 1].mT, rows[d + 1 :].mT)


def _twice_along(function: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second derivatives of a function along a direction, forward over forward."""
    return jvp(lambda x: jvp(function, (x,), (direction,))[1], (x,), (direction,))[:2]  # without has_aux there are two


def _activated(module: Any, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return σ(z), σ′(z) and σ″(z)."""
    if isinstance(module, nn.Tanh):
        a = torch.tanh(z)
        slope = 1 - a.square()
        return a, slope, -2 * a * slope

    def activation(z: Tensor) -> Tensor:
        return module(z.clone())  # an activation in place writes here

    # The Jacobian of an elementwise function is diagonal: along (1, 1, …) stand its numbers.
    with WrittenOut():
        return activation(z), *_twice_along(activation, z, torch.ones_like(z))
