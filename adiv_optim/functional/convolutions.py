"""Convolutions: every patch is a row, and the rows are never unfolded."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..corrections import Correction, check_correction
from .conv_rows import ConvRows, Geometry, plain_backward
from .shared import apply, autocast, check_real, label_for, once_only, refuse_correction_as

_PLAIN = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class _Conv(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input, weight, bias, stride, padding, dilation, groups, correction, label):
        return _PLAIN[weight.dim() - 2](input, weight, bias, stride, padding, dilation, groups)

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
            rows = ConvRows(input, grad_output, weight, ctx.geometry, needs_weight, needs_bias, ctx.label)
            gradients = ctx.correction.gradients(rows)
        if needs_input:
            grad_input, _ = plain_backward(grad_output, input, weight, ctx.geometry, True, False)
        return grad_input, gradients.get("weight"), gradients.get("bias"), *[None] * 6


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
    correction: Correction | None,
    *,
    dims: int,
) -> Tensor:
    name = f"conv{dims}d"
    if correction is None:
        refuse_correction_as(name, "bias", bias)
        return _PLAIN[dims](input, weight, bias, stride, padding, dilation, groups)
    check_correction(correction)
    return corrected_conv(input, weight, bias, stride, padding, dilation, groups, correction, name=name, dims=dims)


def corrected_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
    correction: Correction,
    *,
    name: str,
    dims: int,
) -> Tensor:
    """The convolution with a correction already checked; `name` opens its error messages."""
    check_real(name, input)
    _check_shapes(name, dims, input, weight, groups)
    stride, dilation = per_axis(stride, dims), per_axis(dilation, dims)
    if isinstance(padding, str):
        input, padding = resolve_padding(name, padding, input, weight.shape[2:], stride, dilation)
    padding = per_axis(padding, dims)
    _check_kernel(name, input, weight, padding, dilation)
    batched = input.dim() == dims + 2
    input, weight, bias = autocast(input, weight, bias)  # type: ignore[assignment]
    batch = input if batched else input.unsqueeze(0)
    output = apply(
        _Conv, batch, weight, bias, stride, padding, dilation, groups, correction, label_for(name, f"conv{dims}d")
    )
    return output if batched else output.squeeze(0)


def per_axis(value: int | Sequence[int], dims: int) -> list[int]:
    """One number for each axis, where one may stand for all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def resolve_padding(
    name: str, padding: str, input: Tensor, kernel: Sequence[int], stride: list[int], dilation: list[int]
) -> tuple[Tensor, list[int]]:
    """Turn 'valid' and 'same' into numbers, as torch does: an odd total is padded by one at the far end first."""
    if padding == "valid":
        return input, [0] * len(kernel)
    if padding != "same":
        raise ValueError(f"{name}: padding is {padding!r}; the names are 'valid' and 'same'.")
    if any(step != 1 for step in stride):
        raise ValueError(f"{name}: padding='same' needs stride 1, found {stride}; give the padding as numbers.")
    totals = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
    if any(total % 2 for total in totals):
        input = F.pad(input, [side for total in reversed(totals) for side in (0, total % 2)])
    return input, [total // 2 for total in totals]


def _check_shapes(name: str, dims: int, input: Tensor, weight: Tensor, groups: int) -> None:
    if input.dim() not in (dims + 1, dims + 2):
        raise ValueError(
            f"{name}: input of shape {tuple(input.shape)} has {input.dim()} dimensions; "
            f"it takes (N, C, *spatial) or (C, *spatial) with {dims} spatial ones."
        )
    if weight.dim() != dims + 2:
        raise ValueError(
            f"{name}: weight of shape {tuple(weight.shape)} has {weight.dim()} dimensions; it must have {dims + 2}: "
            "(out_channels, in_channels / groups, *kernel)."
        )
    channels, wanted = input.shape[-dims - 1], weight.shape[1] * groups
    if channels != wanted:
        raise ValueError(
            f"{name}: input of shape {tuple(input.shape)} has {channels} channels, but weight of shape "
            f"{tuple(weight.shape)} with groups={groups} takes {wanted}."
        )


def _check_kernel(name: str, input: Tensor, weight: Tensor, padding: list[int], dilation: list[int]) -> None:
    sizes = [size + 2 * pad for size, pad in zip(input.shape[-len(padding) :], padding, strict=True)]
    reaches = [gap * (size - 1) + 1 for size, gap in zip(weight.shape[2:], dilation, strict=True)]
    if all(reach > size for reach, size in zip(reaches, sizes, strict=True)):
        raise ValueError(
            f"{name}: the kernel reaches over {tuple(reaches)} positions, but the padded input has {tuple(sizes)}: "
            f"input has shape {tuple(input.shape)}, weight {tuple(weight.shape)}. Are these "
            "arguments in the wrong order? The input comes first."
        )


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
    return _conv(input, weight, bias, stride, padding, dilation, groups, correction, dims=1)


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

    The cost over the plain backward is one box filter over the input (`patch_squared_norm`) and one
    rescaled copy of the output gradient.

    Args:
        input: shape (N, C, H, W), or (C, H, W) unbatched.
        weight: shape (out_channels, C / groups, kH, kW).
        bias: shape (out_channels,) or None.
        stride: as in torch.
        padding: as in torch, 'valid' and 'same' included.
        dilation: as in torch.
        groups: as in torch.
        correction: the rule; None is torch's own function and nothing else.

    Returns:
        What torch's function returns.

    Raises:
        TypeError: the correction is no `Correction`, or the input is integer or complex.
        ValueError: wrong dimensions or channel counts, a kernel beyond the input, an unknown padding, 'same' with a
            stride, or in the backward pass scales of the rule that do not fit.

    Example:
        >>> import torch
        >>> from adiv_optim import Proportional, functional
        >>> weight = torch.zeros(1, 1, 1, 1, requires_grad=True)
        >>> image = torch.full((1, 1, 1, 2), 2.0)
        >>> functional.conv2d(image, weight, correction=Proportional()).sum().backward()
        >>> weight.grad.item()  # two patches, each x / |x|²; the plain gradient is 4
        1.0
    """
    return _conv(input, weight, bias, stride, padding, dilation, groups, correction, dims=2)


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
    return _conv(input, weight, bias, stride, padding, dilation, groups, correction, dims=3)
