"""The linear layer: rows × features, the canonical shape every correction is stated in."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..corrections import Correction, check_correction
from ._shared import autocast, check_real, once_only, rescale, scales_of, squared_norm


class _Linear(Function):
    """One layer (weight of two dimensions), or a stack of them: every tensor with a leading dimension more."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, correction: Correction) -> Tensor:
        if weight.dim() == 2:
            return F.linear(input, weight, bias)
        rows = _rows(input, weight)
        output = rows @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
        return output.view(*input.shape[:-1], weight.shape[1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, weight, _, ctx.correction = inputs
        ctx.save_for_backward(input, weight)

    @staticmethod
    def backward(ctx, grad_output):
        grad_output, input, weight = once_only(grad_output, *ctx.saved_tensors)
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        # The parameters come first: what they need in passing is freed before grad_input is allocated, and
        # is never larger, so the peak stays that of the plain backward.
        if needs_weight or needs_bias:
            grad_weight, grad_bias = parameter_gradients(
                _rows(input, weight), _rows(grad_output, weight), ctx.correction, needs_weight, needs_bias
            )
        if needs_input:
            grad_input = (grad_output if weight.dim() == 2 else _rows(grad_output, weight)).matmul(weight)
            grad_input = grad_input.view_as(input)
        return grad_input, grad_weight, grad_bias, None

    @staticmethod
    def vmap(info, in_dims, input, weight, bias, correction):
        # generate_vmap_rule would do, but makes a class at every call and loops in Python through functorch:
        # on an ensemble of small networks that cost more than the networks.
        input, weight, bias = (
            tensor if tensor is None or dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((input, weight, bias), in_dims, strict=False)
        )
        if in_dims[1] is None and in_dims[2] is None and weight.dim() == 2:
            return _Linear.apply(input, weight, bias, correction), 0  # one layer, more rows
        input, weight, bias = (
            tensor if tensor is None or dim is not None else tensor.expand(info.batch_size, *tensor.shape)
            for tensor, dim in zip((input, weight, bias), in_dims, strict=False)
        )
        if weight.dim() == 4:  # a stack of stacks is a longer stack
            flat = (None if tensor is None else tensor.flatten(0, 1) for tensor in (input, weight, bias))
            return _Linear.apply(*flat, correction).unflatten(0, (info.batch_size, -1)), 0
        return _Linear.apply(input, weight, bias, correction), 0


def _rows(tensor: Tensor, weight: Tensor) -> Tensor:
    """(…, features) → (rows, features), below the leading dimension of a stack."""
    first = weight.dim() - 2
    return tensor.flatten(first, -2) if tensor.dim() > first + 1 else tensor.unsqueeze(first)


def parameter_gradients(
    rows: Tensor, grad_rows: Tensor, correction: Correction, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Contract rows and output gradients into corrected gradients of weight and bias.

    grad_W = Σ_k s_k g_k x_kᵀ = (s ⊙ G)ᵀ X = Gᵀ (s ⊙ X), whichever of X and G is narrower being scaled, and
    grad_b = Σ_k s_k g_k.

    Args:
        rows: X, shape (rows, in_features), or (stack, rows, in_features).
        grad_rows: G, shape (rows, out_features), or (stack, rows, out_features).
        correction: the rule.
        needs_weight: whether grad_W is wanted.
        needs_bias: whether grad_b is wanted.
    """
    scales = scales_of(correction, squared_norm(rows, -1), needs_weight, needs_bias)
    grad_weight = grad_bias = None
    if needs_weight:
        scale = scales["weight"].unsqueeze(-1)
        # float16 ends at 65504, which s g may pass where s g xᵀ does not; s x = x / (|x|² + 1) stays below 1.
        if rows.shape[-1] < grad_rows.shape[-1] or rows.dtype == torch.float16:
            grad_weight = grad_rows.mT @ rescale(rows, scale)
        else:
            grad_weight = rescale(grad_rows, scale).mT @ rows
    if needs_bias:
        scale = scales["bias"]
        grad_bias = (grad_rows.mT.to(scale.dtype) @ scale.unsqueeze(-1)).squeeze(-1).to(grad_rows.dtype)
    return grad_weight, grad_bias


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, correction: Correction | None = None) -> Tensor:
    r"""torch.nn.functional.linear whose parameter gradients follow a correction.

    Forward :math:`z = W x + b` and input gradient :math:`g W` are torch's, bit for bit. The parameters
    receive :math:`\sum_k s_{W,k}\, g_k x_k^\top` and :math:`\sum_k s_{b,k}\, g_k` (Bird 2025, Eqs. 20 and 21), where
    k runs over rows and s is the correction's. A frozen weight or bias does not move the output, so it
    is left out of the divergence that is corrected.

    The cost over the plain backward is one pass over X and one over the narrower of X and G; memory that
    is live at the peak does not grow. Works under vmap, torch.compile, autocast and in half precision, in
    which norms and scales are float32. Forward-mode and second derivatives raise.

    Args:
        input: shape (..., in_features); every leading dimension counts rows.
        weight: shape (out_features, in_features).
        bias: shape (out_features,) or None.
        correction: the rule; None is torch's own function and nothing else.

    Returns:
        Shape (..., out_features).

    Raises:
        TypeError: the correction is no `Correction`, or the input is integer or complex.
        ValueError: the feature counts of input and weight differ.

    Example:
        >>> import torch
        >>> from adiv_optim import Proportional, functional
        >>> weight = torch.zeros(1, 2, requires_grad=True)
        >>> functional.linear(torch.tensor([[1.0, 1.0]]), weight, None, Proportional()).sum().backward()
        >>> weight.grad  # x / |x|²; the plain gradient is x
        tensor([[0.5000, 0.5000]])
    """
    if correction is None:
        return F.linear(input, weight, bias)
    return corrected_linear(input, weight, bias, check_correction(correction), name="linear")


def corrected_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, correction: Correction, *, name: str
) -> Tensor:
    """`linear` with a correction already checked; `name` opens its error messages."""
    check_real(name, input)
    if input.dim() == 0 or input.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{name}: input of shape {tuple(input.shape)} has {input.shape[-1] if input.dim() else 'no'} features, "
            f"but weight of shape {tuple(weight.shape)} takes {weight.shape[-1]}; make the last dimension of the "
            f"input {weight.shape[-1]}."
        )
    output: Tensor = _Linear.apply(*autocast(input, weight, bias), correction)
    return output
