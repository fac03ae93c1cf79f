"""The rule of each operation, which lets scales pass, joins or pins them, or carries channels to other places."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import layer_rules
from .call import Activation, Call, ParameterView, Value

NUMBERS = (int, float, complex)


def homogeneous(call: Call) -> Any:
    """Let scales pass, where f(sx) = s f(x) element by element; every other tensor that goes in is pinned."""
    for value in list(call.arguments.values())[1:]:
        call.pin(value)
    return call.result(call.ids(call.first))


def identity(call: Call) -> Any:
    """Let scales pass where values stay, maybe elsewhere or in another precision."""
    if isinstance(call.output, Tensor) and not call.output.is_floating_point():
        return call.pin_all(f"{call.label} gives {call.output.dtype}")
    return call.first if isinstance(call.first, ParameterView) else call.result(call.ids(call.first))


def fill(call: Call) -> Any:
    """Let scales pass where the numbers that are put in are 0 or infinite."""
    numbers = [call[name] for name in ("min", "max", "threshold", "value") if call[name] is not None]
    return homogeneous(call) if all(_is_scale_free(number) for number in numbers) else call.pin_all()


def add(call: Call) -> Any:
    """Join the arguments of a sum, difference, maximum or minimum."""
    pair = (call["self"], call["other"])
    for value, other in (pair, pair[::-1]):
        if isinstance(value, ParameterView) and isinstance(other, Activation):
            return layer_rules.add_parameter(call, other, value)
        if isinstance(value, NUMBERS):
            if not _is_scale_free(value):
                call.pin(other, f"{call.label} with a constant")
            return call.result(call.ids(other))
    first, second = map(call.ids, pair)
    call.channels.join(first, second, f"shares its scale with a pinned one, through {call.label}")
    return call.result(torch.broadcast_tensors(first, second)[0])


def where(call: Call) -> Any:
    """Join the two activations of a choice; a choice between two numbers is a constant."""
    call.pin(call["condition"])
    both_numbers = all(isinstance(call[name], NUMBERS) for name in ("self", "other"))
    return call.constants() if both_numbers else add(call)


def copy(call: Call) -> Any:
    """Return the channels of what is written, whatever it is written over."""
    return call.result(call.ids(call["src"]))


def multiply(call: Call) -> Any:
    """Let the scale of one factor pass where no scale touches the other; a parameter is a learned factor."""
    pair = (call["self"], call["other"])
    both_orders = (pair, pair[::-1])
    for value, other in both_orders:
        is_mask = isinstance(value, Activation) and not call.channels.find(value.channels).any()
        if isinstance(other, ParameterView) and call.shape == other.shape and (is_mask or isinstance(value, NUMBERS)):
            return other  # as pruned weights
    for value, other in both_orders:
        if isinstance(value, NUMBERS):
            return call.result(call.ids(other))
        if isinstance(value, ParameterView) and isinstance(other, Activation):
            return layer_rules.multiply_by_parameter(call, other, value)
    if isinstance(pair[0], ParameterView):  # and so the other one
        return call.pin_all()
    first, second = torch.broadcast_tensors(*(call.channels.find(value.channels) for value in pair))
    free = (first != 0) & (second != 0)
    for ids in (first[free], second[free]):
        call.channels.pin(ids, f"multiplied by another activation: {call.label}")
    return call.result(torch.maximum(call.channels.find(first), call.channels.find(second)))


def divide(call: Call) -> Any:
    """Let the scale of the numerator pass; the divisor is pinned."""
    if call["rounding_mode"] is not None:
        return call.pin_all()
    is_scaled = isinstance(call.first, ParameterView) and isinstance(call["other"], NUMBERS)
    return call.first if is_scaled else homogeneous(call)


def reduce(call: Call) -> Any:
    """Join entries that are summed, averaged or compared."""
    if call["other"] is not None:  # torch.max of two tensors
        return add(call)
    dims = call["dim"]
    dims = [dims] if isinstance(dims, int) else list(dims or range(len(call.first.shape)))
    ids = call.join_along(call.first, dims, "summed or compared by")
    return call.result(ids if len(call.shape) == ids.dim() else ids.squeeze(tuple(dims)))


def pool(call: Call) -> Any:
    """Join positions that are pooled or resized: the last dimensions, as many as the name says."""
    spatial = int(next(letter for letter in call.name if letter.isdigit()))
    return call.result(call.join_along(call.first, range(-spatial, 0), "positions at"))


def pad(call: Call) -> Any:
    """Join what is padded, with zeros or with the tensor's values, along each dimension that grows or shrinks."""
    if call["value"]:
        return call.pin_all(f"{call.label} with {call['value']}")
    dims = [-1 - place // 2 for place, amount in enumerate(call["pad"]) if amount]
    return call.result(call.join_along(call.first, dims, "positions at"))


def rearrange(call: Call) -> Any:
    """Move each channel to its place, by the same operation on a tensor of channels."""

    def run(substitute: Callable[[Value], Tensor]) -> Any:
        return call.operator(**pytree.tree_map_only((Activation, ParameterView), substitute, call.arguments))

    if isinstance(parameter := call.first, ParameterView):
        view = run(lambda value: value.view)
        if isinstance(view, Tensor) and view.untyped_storage()._cdata == parameter.base.untyped_storage()._cdata:
            moved = replace(parameter, view=view)
            if moved.axes() is not None:
                return moved
    whole = list[Tensor]()

    def spread(value: Value) -> Tensor:
        ids = call.ids(value)
        whole.extend([ids] * isinstance(value, ParameterView))
        return ids.expand(value.shape)

    ids = run(spread)
    parts = [ids] if isinstance(ids, Tensor) else ids
    for of_parameter in whole:  # what is left out of it stays as it is
        left_out = ~torch.isin(of_parameter, torch.cat([part.flatten() for part in parts]))
        call.channels.pin(of_parameter[left_out], f"left out by {call.label}")
    if isinstance(ids, Tensor):
        return call.result(ids)
    return [Activation(tuple(part.shape), call.channels.compress(part)) for part in ids]


def reshape(call: Call) -> Any:
    """Move channels as a reshape or an expansion to the shape of the output does."""
    # A view of ids that were spread out need not exist where that of the activation does.
    if call["dtype"] is not None:
        return call.pin_all(f"{call.label} as another type")
    aten = torch.ops.aten
    operator, size = (aten.broadcast_to, "size") if call.name.startswith("expand") else (aten.reshape, "shape")
    return rearrange(replace(call, operator=operator.default, arguments={"self": call.first, size: list(call.shape)}))


def concatenate(call: Call) -> Any:
    """Put channels side by side: spread out along that dimension, and along others only where they differ."""
    # torch lets empty parts be vectors.
    parts = [(call.ids(value), value.shape) for value in call["tensors"] if len(value.shape) == len(call.shape)]
    dim = (call["dim"] or 0) % len(call.shape)
    sizes = [max(ids.shape[d] for ids, _ in parts) for d in range(len(call.shape))]
    spread = [ids.expand([*sizes[:dim], shape[dim], *sizes[dim + 1 :]]) for ids, shape in parts]
    return call.result(torch.cat(spread, dim))


def compare(call: Call) -> Any:
    """Leave scales free in a comparison with 0 or ±inf, whose result is a constant; pin in any other."""
    return call.constants() if _is_scale_free(call["other"]) else call.pin_all()


def _is_scale_free(value: Value) -> bool:
    """Whether it is 0, inf or −inf, which no positive factor changes."""
    return isinstance(value, (int, float)) and (value == 0 or math.isinf(value))


_GROUPS: dict[Callable[[Call], Any], str] = {
    layer_rules.linear: "linear addmm",
    layer_rules.matmul: "mm matmul bmm",
    layer_rules.attention: "scaled_dot_product_attention",
    layer_rules.convolution: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
    layer_rules.embedding: "embedding",
    layer_rules.batch_norm: "batch_norm instance_norm",
    layer_rules.norm_across_channels: "group_norm layer_norm rms_norm",
    homogeneous: (
        "relu leaky_relu rrelu prelu abs absolute neg negative positive dropout feature_dropout native_dropout"
    ),
    identity: "to _to_copy clone contiguous detach alias type_as lift_fresh lift_fresh_copy",
    fill: "clamp clamp_min clamp_max clip threshold masked_fill",
    add: "add sub subtract rsub maximum minimum",
    copy: "copy",
    where: "where",
    multiply: "mul multiply",
    divide: "div divide true_divide",
    reduce: "mean sum amax amin cumsum max min",
    pool: (
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"
    ),
    pad: "pad constant_pad_nd",
    reshape: "reshape view _unsafe_view ravel flatten unflatten expand expand_as view_as reshape_as",
    rearrange: (
        "permute transpose t swapaxes swapdims movedim moveaxis numpy_T mT mH adjoint squeeze unsqueeze repeat tile "
        "repeat_interleave stack split split_with_sizes chunk unbind slice select narrow flip roll pixel_shuffle "
        "pixel_unshuffle channel_shuffle diagonal tensor_split hstack vstack"
    ),
    concatenate: "cat concat concatenate",
    compare: "gt ge lt le eq ne greater greater_equal less less_equal not_equal",
    Call.constants: (
        "sign sgn zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones "
        "new_full new_empty sym_size sym_numel size _assert_tensor_metadata _assert_scalar _assert_async"
    ),
}

#: Operation → rule, by the operation's name without overload and in-place underscore; any other is `Call.pin_all`.
RULES = {name: rule for rule, names in _GROUPS.items() for name in names.split()}
