"""The unit-consistent adjoint and inverse of a matrix, and backpropagation through the adjoint."""

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils import parametrize

from .. import _device, _torch
from ..rows.models import bypassed, first_argument, label
from .rz import check_weight, rz_scaling


def uc_adjoint(weight: Tensor) -> Tensor:
    r"""Return the transpose taken in canonical coordinates, :math:`E^{-1} W^\top D^{-1} = W'^\top` with W = D W' E.

    Uhlmann, *Unit-Consistent (UC) Adjoint*, Eq. 6. Unlike :math:`W^\top` it is the same for W and for A W B with any
    positive diagonal A and B. Output gradients sent back through it do not depend on a layer's units, and are not the
    gradient of the loss. The adjoint of a convolution has the kernel `rz_scaling(…).canonical`, transposed.

    Args:
        weight: W, shape (…, out, in); leading dimensions are a batch.

    Returns:
        Shape (…, in, out), without autograd graph; conjugated if the weight is complex.

    Raises:
        TypeError, ValueError: as `rz_scaling`.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[2.0, 8.0], [-2.0, 0.5]])
        >>> uc_adjoint(weight)
        tensor([[ 0.5000, -2.0000],
                [ 2.0000,  0.5000]])
    """
    return rz_scaling(weight).canonical.mH


@torch.no_grad()
def uc_inverse(weight: Tensor, *, rtol: float | None = None) -> Tensor:
    r"""Return the generalised inverse that changes with the units of a matrix as its inverse would.

    .. math:: W^{-U} = E^{-1} W'^{+} D^{-1} \quad\text{with } W = D W' E

    For all diagonal A and B without zeros :math:`(A W B)^{-U} = B^{-1} W^{-U} A^{-1}` (Uhlmann, *Unit-Consistent (UC)
    Adjoint*, section 1, after Uhlmann 2018), which the pseudo-inverse :math:`W^{+}` satisfies only for invertible W.
    :math:`W W^{-U} W = W`, :math:`W^{-U} W W^{-U} = W^{-U}`, and :math:`W^{-U} = W^{-1}` where that exists.

    Args:
        weight: W, shape (…, out, in), of any rank; leading dimensions are a batch.
        rtol: singular values of W' below this share of the greatest count as zero. The default, 10 · max(out, in) ·
            machine precision, leaves room for the rounding of every entry by a change of units.

    Returns:
        Shape (…, in, out), in the weight's dtype, without autograd graph.

    Raises:
        TypeError, ValueError: as `rz_scaling`.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[1.0, 2.0], [2.0, 4.0]])  # of rank one
        >>> units = torch.tensor([1.0, 100.0])
        >>> torch.allclose(uc_inverse(weight * units), uc_inverse(weight) / units[:, None])
        True
        >>> torch.allclose(torch.linalg.pinv(weight * units), torch.linalg.pinv(weight) / units[:, None])
        False
    """
    check_weight(weight, 1, 0)  # before integers become floating point
    row_scale, canonical, column_scale = rz_scaling(_device.at_least_float32(weight))
    if rtol is None:
        rtol = 10 * max(canonical.shape[-2:]) * torch.finfo(canonical.dtype).eps
    inverse = torch.linalg.pinv(canonical, rtol=rtol)
    return (inverse / column_scale[..., :, None] / row_scale[..., None, :]).to(weight.dtype)


class _ScaledGradient(Function):
    """The identity, whose backward pass multiplies by `scale`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, scale: Tensor) -> Tensor:
        return input.view_as(input)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad_output):
        (scale,) = ctx.saved_tensors
        return (grad_output * scale).to(grad_output.dtype), None  # a scale may be beyond float16


def uc_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Apply torch.nn.functional.linear with a backward pass through W'ᵀ in place of Wᵀ.

    With W = D W' E by `gauge.rz_scaling` and g the gradient that arrives at the output,

    .. math:: g_x = W'^\top g = E^{-1} W^\top D^{-1} g, \qquad g_W = \sum_k D^{-1} g_k x_k^\top, \qquad
              g_b = \sum_k D^{-1} g_k

    (Uhlmann, *Unit-Consistent (UC) Adjoint for GSD and Backprop in Deep Learning Applications*, A.3). In a chain of
    such layers and ReLUs no rescaling of hidden units changes any g: g is without units. D⁻¹ gives the parameters'
    gradients the units of gradients, so that `UnitConsistent` maps them as it maps any other, up to a scalar per layer,
    which Adam does not see: S_out = S_in = c changes x and leaves the weight as it is.

    **None of these is a gradient of the loss**: the chain leaves out the rescaling D E between one layer's canonical
    output and the next one's canonical input. The steps need not go downhill, and second derivatives mean nothing. It
    costs one `rz_scaling`. torch.func.vmap may go over the input, but not over the weight, whose zeros have to be seen.

    Args:
        input: shape (…, in_features).
        weight: shape (out_features, in_features).
        bias: shape (out_features,) or None.

    Returns:
        Shape (…, out_features); bit for bit torch's.

    Raises:
        TypeError, ValueError: as `gauge.rz_scaling`: NaN or inf in the weight, or a scale out of range.

    Example:
        >>> import torch
        >>> from adiv_optim.gauge import uc_linear
        >>> weight, units = torch.tensor([[2.0, 8.0], [-2.0, 0.5]]), torch.tensor([1.0, 100.0])
        >>> x = torch.ones(2, requires_grad=True)
        >>> uc_linear(x, weight).sum().backward()
        >>> y = torch.ones(2, requires_grad=True)
        >>> uc_linear(y, weight * units).sum().backward()
        >>> torch.allclose(x.grad, y.grad)
        True
    """
    row_scale, _, column_scale = rz_scaling(weight)
    input = _ScaledGradient.apply(input, 1 / column_scale)
    # A view would not let an activation in place write.
    return _ScaledGradient.apply(F.linear(input, weight, bias), 1 / row_scale).clone()


def uc_backpropagation(model: nn.Module) -> "UCBackpropagation":
    """Let a model's backward pass go through every layer's W'ᵀ; its forward pass stays as it is.

    Layers are nn.Linear, nn.Conv1d/2d/3d and their subclasses, and not the projections of nn.MultiheadAttention, which
    are used without a call. They get hooks, which a graph that torch.compile has made before does not call. Their
    class, parameters and state dict stay, and corrections may be attached as well. See `uc_linear` for the equation;
    the adjoint of a convolution scales channels, per group.
    **p.grad does not hold a gradient of the loss.**

    Args:
        model: any module, itself a layer included.

    Returns:
        A handle whose `remove()` restores torch's backward pass; also a context manager. A copy of the model keeps the
        backward pass, and has no handle.

    Raises:
        ValueError: the model has no such layer, or one that goes through W'ᵀ already.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from adiv_optim.gauge import uc_backpropagation
        >>> model, x = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 2)
        >>> plain, = torch.autograd.grad(model(x).sum(), model[0].weight)
        >>> with uc_backpropagation(model):
        ...     changed, = torch.autograd.grad(model(x).sum(), model[0].weight)
        >>> restored, = torch.autograd.grad(model(x).sum(), model[0].weight)
        >>> torch.equal(plain, restored), torch.equal(plain, changed)
        (True, False)
    """
    modules, without_call = dict(model.named_modules()), bypassed(model)
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layers = {path: layer for path, layer in modules.items() if isinstance(layer, kinds) and layer not in without_call}
    for path, layer in layers.items():
        if any(isinstance(getattr(hook, "__self__", None), _LayerHooks) for hook in layer._forward_hooks.values()):
            raise ValueError(
                f"uc_backpropagation: {label(path)} has it already, and twice would scale its gradient twice; "
                "call remove() of the first call's handle. A copy keeps the hooks of its original: copy before."
            )
    if not layers:
        types = ", ".join(sorted({type(module).__name__ for module in modules.values()}))
        raise ValueError(f"uc_backpropagation: found modules of type {types}; it goes on Linear and Conv1d/2d/3d.")
    handle = UCBackpropagation()
    for layer in layers.values():
        hooks = _LayerHooks()
        handle.callback(layer.register_forward_pre_hook(hooks.before, with_kwargs=True).remove)
        handle.callback(layer.register_forward_hook(hooks.after, always_call=True).remove)
    return handle


class UCBackpropagation(ExitStack):
    """The handle of `uc_backpropagation`: `remove()`, or the end of a with statement, takes the hooks off."""

    def remove(self) -> None:
        """Restore torch's backward pass; a second time does nothing."""
        self.close()


class _LayerHooks:
    """The hooks of a layer, which do what `uc_linear` does; a class, so that models that have them can be pickled."""

    inverse_rows: Tensor | None = None  # from one hook to the other
    cache: ExitStack | None = None  # in which a parametrized weight is computed once for both

    def before(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or _torch.is_exporting():
            return None
        if parametrize.is_parametrized(layer):
            self.cache = ExitStack()
            self.cache.enter_context(parametrize.cached())
        kernel_dims = layer.weight.dim() - 2
        scaling = rz_scaling(layer.weight, groups=getattr(layer, "groups", 1), kernel_dims=kernel_dims)
        self.inverse_rows, inverse_columns = ((1 / scale).view(-1, *(1,) * kernel_dims) for scale in scaling[::2])
        if args:
            return (_ScaledGradient.apply(args[0], inverse_columns), *args[1:]), kwargs
        name = first_argument(layer, kwargs)
        return args, {**kwargs, name: _ScaledGradient.apply(kwargs[name], inverse_columns)}

    def after(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        inverse_rows, self.inverse_rows, cache, self.cache = self.inverse_rows, None, self.cache, None
        if cache is not None:
            cache.close()
        return None if inverse_rows is None or output is None else _ScaledGradient.apply(output, inverse_rows).clone()
