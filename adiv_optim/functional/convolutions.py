"""Convolutions: every patch is a row; see `conv_rows` for when rows are unfolded."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .._device import without_autocast
from ..corrections import Correction, check_correction
from .conv_rows import ConvRows, conv_gradient
from .patches import Geometry, Patches
from .shared import apply_function, cast_by_autocast, check_input, may_train, once_only

#: Stride, padding, dilation and groups, as torch's functions take them.
ConvArgs = tuple[int | Sequence[int], int | Sequence[int] | str, int | Sequence[int], int]

#: torch's own convolutions, by their number of dimensions.
TORCH_CONV: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class _Conv(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input, weight, bias, stride, padding, dilation, groups, correction, label):
        return TORCH_CONV[weight.dim() - 2](input, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, weight, _, *geometry, ctx.correction, ctx.label = inputs
        ctx.geometry = Geometry(*geometry)
        ctx.save_for_backward(input, weight)

    @staticmethod
    def backward(ctx, grad_output):
        grad_output, input, weight = once_only(grad_output, *ctx.saved_tensors)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gradients, grad_input = {}, None
        if needs_weight or needs_bias:
            patches = Patches(input, weight.shape[2:], ctx.geometry)
            rows = ConvRows(patches, grad_output, weight, needs_weight, needs_bias, ctx.label)
            with without_autocast(input.device.type):
                gradients = rows.corrected_by(ctx.correction)
        if needs_input:
            grad_input = conv_gradient("input", grad_output, input, weight, ctx.geometry)
        return grad_input, gradients.get("weight"), gradients.get("bias"), *[None] * 6


def _conv(
    dims: int, input: Tensor, weight: Tensor, bias: Tensor | None, args: ConvArgs, correction: Correction | None
) -> Tensor:
    if correction is None:
        return TORCH_CONV[dims](input, weight, bias, *args)
    return corrected_conv(f"conv{dims}d", input, weight, bias, args, dims, check_correction(correction))


def corrected_conv(
    label: str, input: Tensor, weight: Tensor, bias: Tensor | None, args: ConvArgs, dims: int, correction: Correction
) -> Tensor:
    """Compute the convolution with a correction that has been checked; `label` opens its error messages."""
    check_input(label, input)
    fits = input.dim() in (dims + 1, dims + 2) and weight.dim() == dims + 2
    if not fits or input.shape[-dims - 1] != weight.shape[1] * args[-1]:
        raise ValueError(
            f"{label}: input and weight have shapes {tuple(input.shape)} and {tuple(weight.shape)}, groups={args[-1]}; "
            "they must be (N, C, *spatial) or (C, *spatial) and (out_channels, C / groups, *kernel), with spatial and "
            f"kernel of {dims} dimensions."
        )
    batch, _, geometry = conv_patches(label, input, weight.shape[2:], args)
    if may_train(weight, bias):
        batch, weight, bias = cast_by_autocast(batch, weight, bias)  # type: ignore[assignment]
        output = apply_function(_Conv, batch, weight, bias, *geometry, correction, label=label)
    else:
        output = TORCH_CONV[dims](batch, weight, bias, *geometry)
    return output if input.dim() == dims + 2 else output.squeeze(0)


def conv_patches(label: str, input: Tensor, kernel: Sequence[int], args: ConvArgs) -> Patches:
    """Return the patches of an input, batched or not."""
    stride, padding, dilation, groups = args
    stride, dilation = _per_axis(stride, kernel), _per_axis(dilation, kernel)
    if isinstance(padding, str):
        input, padding = _resolve_padding(label, padding, input, kernel, stride, dilation)
    batch = input if input.dim() == len(kernel) + 2 else input.unsqueeze(0)
    return Patches(batch, kernel, Geometry(stride, _per_axis(padding, kernel), dilation, groups))


def _per_axis(value: int | Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Repeat a number that stands for all axes; torch's function refuses any other count but one for each axis."""
    values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * len(kernel) if len(values) == 1 else values


def _resolve_padding(
    label: str, padding: str, input: Tensor, kernel: Sequence[int], stride: list[int], dilation: list[int]
) -> tuple[Tensor, list[int]]:
    """Turn 'valid' and 'same' into numbers, as torch does: an odd total is padded by one at the far end first."""
    if padding == "valid":
        return input, [0] * len(kernel)
    if padding != "same" or any(step != 1 for step in stride):
        raise ValueError(
            f"{label}: padding is {padding!r} at stride {stride}; it must be numbers, 'valid', or 'same' at stride 1."
        )
    totals = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=False)]
    if any(total % 2 for total in totals):
        input = F.pad(input, [side for total in reversed(totals) for side in (0, total % 2)])
    return input, [total // 2 for total in totals]


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    correction: Correction | None = None,
) -> Tensor:
    """torch.nn.functional.conv1d whose parameter gradients follow a correction; see `conv2d`."""
    return _conv(1, input, weight, bias, (stride, padding, dilation, groups), correction)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    correction: Correction | None = None,
) -> Tensor:
    r"""torch.nn.functional.conv2d whose parameter gradients follow a correction.

    A convolution is a linear layer whose rows are patches (Bird 2025, Appendix B.2): the weight receives
    :math:`\sum_p s_{W,p}\, g_p\, x_p^\top` over the patches :math:`x_p` of all samples and positions, the bias
    :math:`\sum_p s_{b,p}\, g_p`, with s from :math:`|x_p|^2`. Each group has patches, and so scales, of its own.
    Forward and input gradient are torch's, bit for bit; channels_last stays channels_last.

    Args:
        input: shape (N, C, H, W), or (C, H, W) unbatched.
        weight: shape (out_channels, C / groups, kH, kW).
        bias: shape (out_channels,) or None.
        stride: as in torch; so are padding, dilation and groups.
        padding: numbers, 'valid' or 'same'.
        dilation: of the kernel.
        groups: of channels.
        correction: the rule; None is torch's own function and nothing else.

    Returns:
        Shape (N, out_channels, *out_spatial), without N where the input has none.

    Raises:
        TypeError: the correction is no `Correction`, or the input is integer, complex, sparse or nested.
        ValueError: wrong dimensions or channel counts, an unknown padding, 'same' with a stride, or in the backward
            pass scales of the rule that do not fit.
        RuntimeError: it is differentiated twice; or torch's, of a kernel beyond the input, a bias of another size, or
            wrong numbers of strides.

    Example:
        >>> import torch
        >>> from adiv_optim import Proportional, functional
        >>> weight = torch.zeros(1, 1, 1, 1, requires_grad=True)
        >>> image = torch.full((1, 1, 1, 2), 2.0)
        >>> functional.conv2d(image, weight, correction=Proportional()).sum().backward()
        >>> weight.grad.item()  # two patches, each x / |x|²; the plain gradient is 4
        1.0
    """
    return _conv(2, input, weight, bias, (stride, padding, dilation, groups), correction)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    correction: Correction | None = None,
) -> Tensor:
    """torch.nn.functional.conv3d whose parameter gradients follow a correction; see `conv2d`."""
    return _conv(3, input, weight, bias, (stride, padding, dilation, groups), correction)
