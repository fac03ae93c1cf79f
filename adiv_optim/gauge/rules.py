"""A rule for each operation: it passes a scale, shares it, moves it about, or pins it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import layer_rules
from .call import Activation, Call, Parameter, Value


def passes(call: Call) -> Any:
    """f(sx) = s f(x), element by element; every other tensor that goes in is pinned."""
    for value in list(call.arguments.values())[1:]:
        call.pin(value)
    return call.result(call.ids(call.first))


def identity(call: Call) -> Any:
    """The same values, maybe elsewhere or in another precision."""
    if isinstance(call.output, Tensor) and not call.output.is_floating_point():
        return call.pin_all(call.located(f"cast to {call.output.dtype}"))
    return call.first if isinstance(call.first, Parameter) else call.result(call.ids(call.first))


def clamp(call: Call) -> Any:
    """A clamp or threshold, which is homogeneous where its bounds are 0."""
    bounds = [bound for name, bound in list(call.arguments.items())[1:] if bound is not None]
    return passes(call) if all(_is_zero(bound) for bound in bounds) else call.pin_all()


def add(call: Call) -> Any:
    """A sum, difference, maximum or minimum: its two arguments share their scale."""
    for value, other in _both_ways(call):
        if isinstance(value, Parameter) and isinstance(other, Activation):
            return layer_rules.added(call, other, value)
    for value, other in _both_ways(call):
        if isinstance(value, (int, float, complex)):
            if value != 0:
                call.pin(call.uses.activation(other), f"{call.label} with a constant")
            return call.result(call.ids(other))
    return _joined(call)


def copied(call: Call) -> Any:
    """Writing one tensor over another: its scale goes with it."""
    return call.result(call.ids(call["src"]))


def where(call: Call) -> Any:
    """A choice between two activations: they share their scale; between two numbers, a constant."""
    call.pin(call["condition"])
    if all(isinstance(call[name], (int, float)) for name in ("self", "other")):
        return call.constants()
    for value, other in _both_ways(call):
        if _is_zero_or_infinite(value):
            return call.result(call.ids(other))
    if not all(isinstance(call[name], (Activation, Parameter)) for name in ("self", "other")):
        return call.pin_all()
    return _joined(call)


def masked_fill(call: Call) -> Any:
    """Filling with 0 or infinity passes."""
    return passes(call) if _is_zero_or_infinite(call["value"]) else call.pin_all()


def multiply(call: Call) -> Any:
    """A product has the scale of one factor where no scale touches the other; a parameter is a gain."""
    for value, other in _both_ways(call):
        if isinstance(other, Parameter) and call.shape == tuple(other.view.shape) and call.is_constant(value):
            return other  # times a mask, as pruned weights, or a number
        if isinstance(value, (int, float, complex)):
            return call.result(call.ids(other))
        if isinstance(value, Parameter) and isinstance(other, Activation):
            return layer_rules.gain(call, other, value)
    factors = (call["self"], call["other"])
    if any(isinstance(value, Parameter) for value in factors):  # the product of two parameters
        return call.pin_all()
    first, second = torch.broadcast_tensors(*(call.channels.find(call.ids(value)) for value in factors))
    free = (first != 0) & (second != 0)
    for ids in (first[free], second[free]):
        call.channels.pin(ids, f"multiplied by another activation: {call.label}")
    return call.result(torch.maximum(call.channels.find(first), call.channels.find(second)))


def divide(call: Call) -> Any:
    """A quotient has the scale of its numerator; the divisor is pinned."""
    if call["rounding_mode"] is not None or not isinstance(call.first, (Activation, Parameter)):
        return call.pin_all()
    return passes(call)


def reduce(call: Call) -> Any:
    """Entries that are summed, averaged or compared share their scale."""
    x, dims = call.uses.activation(call.first), call["dim"]
    dims = [dims] if isinstance(dims, int) else list(dims) if dims else list(range(len(x.shape)))
    ids = call.share(x, dims, "summed or compared by")
    if len(call.shape) < ids.dim():
        dims = [dim % ids.dim() for dim in dims]
        ids = ids.reshape([size for dim, size in enumerate(ids.shape) if dim not in dims])
    return call.result(ids)


def maximum(call: Call) -> Any:
    """torch.max in its three forms."""
    return add(call) if call["other"] is not None else reduce(call)


def pool(call: Call) -> Any:
    """Pooling and resizing over the last dimensions, as many as the name says."""
    spatial = int(next(letter for letter in call.name if letter.isdigit()))
    return call.result(call.share(call.first, range(-spatial, 0), "positions at"))


def pad(call: Call) -> Any:
    """Padding with zeros or with the tensor's values passes; zeros in place of channels are new channels."""
    mode, value = call["mode"] or "constant", call["value"]
    if mode == "constant" and value:
        return call.pin_all(call.located(f"padded with {value}"))
    ids, amounts = call.ids(call.first), list(call["pad"])
    for place, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = ids.dim() - 1 - place
        if ids.shape[dim] == 1 or (before, after) == (0, 0):
            continue
        if mode != "constant" or before < 0 or after < 0:
            ids = call.channels.share(ids, [dim], f"padded by {call.label}")
            continue
        zeros = [
            call.channels.fresh(f"zeros of {call.where}", [*ids.shape[:dim], count, *ids.shape[dim + 1 :]])
            for count in (before, after)
        ]
        ids = torch.cat([zeros[0], ids, zeros[1]], dim)
    return call.result(ids)


def rearrange(call: Call) -> Any:
    """Shape operations: the same operation on a tensor of channels moves each of them to its place."""
    tensors = call.tensors()
    if any(isinstance(value, torch.dtype) for value in call.arguments.values()):
        return call.pin_all(call.located("bits read as another type"))
    if len(tensors) == 1 and isinstance(parameter := tensors[0], Parameter):
        view = _run(call, call.operator, lambda value: parameter.view if value is parameter else value)
        if isinstance(view, Tensor) and view.untyped_storage()._cdata == parameter.base.untyped_storage()._cdata:
            moved = replace(parameter, view=view)
            if moved.axes() is not None:
                return moved

    def ids(value: Value) -> Value:
        if not isinstance(value, (Activation, Parameter)):
            return value
        x = call.uses.activation(value)
        return x.channels.expand(x.shape)

    # A view of ids that were spread out need not exist where that of the activation does.
    moved = _run(call, torch.reshape if call.name in ("view", "_unsafe_view") else call.operator, ids)
    if not isinstance(moved, Tensor):
        return [Activation(tuple(part.shape), call.channels.compress(part)) for part in moved]
    return call.result(moved) if tuple(moved.shape) == call.shape else call.pin_all()


def _run(call: Call, operator: Callable[..., Any], change: Callable[[Value], Value]) -> Any:
    """Call an operator with an operation's arguments, each changed first, in lists too."""
    by_keyword = {argument.name for argument in call.operator._schema.arguments if argument.kwarg_only}
    positional = [value for name, value in call.arguments.items() if name not in by_keyword]
    return operator(*pytree.tree_map(change, positional), **{name: call.arguments[name] for name in by_keyword})


def concatenate(call: Call) -> Any:
    """Parts side by side; ids are spread out along that dimension, and along others only where they differ."""
    parts = [call.uses.activation(value) for value in call["tensors"]]
    dim = (call["dim"] or 0) % len(call.shape)
    if any(len(part.shape) != len(call.shape) for part in parts):  # torch lets empty ones be vectors
        return rearrange(call)
    sizes = [max(part.channels.shape[d] for part in parts) for d in range(len(call.shape))]
    spread = [part.channels.expand([*sizes[:dim], part.shape[dim], *sizes[dim + 1 :]]) for part in parts]
    return call.result(torch.cat(spread, dim))


def like(call: Call) -> Any:
    """Taking the shape of another tensor, of which only the shape matters."""
    aten = torch.ops.aten
    operator, size = (aten.broadcast_to, "size") if call.name == "expand_as" else (aten.reshape, "shape")
    return rearrange(replace(call, operator=operator.default, arguments={"self": call.first, size: list(call.shape)}))


def index(call: Call) -> Any:
    """Picking positions: all along the indexed dimension share their scale, so that any index picks the same."""
    x, dims = call.uses.activation(call.first), call["dim"]
    indices = call["index"] if call["index"] is not None else call["indices"]
    positions = list(indices) if isinstance(indices, (list, tuple)) else None
    dims = [dims] if positions is None else [dim for dim, index in enumerate(positions) if index is not None]
    ids = call.share(x, dims, "picked by").expand(x.shape)
    if positions is None:
        return call.result(call.operator(ids, dims[0], torch.zeros(indices.shape, dtype=torch.long)))
    at = [None if index is None else torch.zeros(index.shape, dtype=torch.long) for index in positions]
    moved = torch.ops.aten.index.Tensor(ids, at)
    # A mask is no position: how many it keeps is in its values.
    return call.result(moved) if tuple(moved.shape) == call.shape else call.pin_all()


def compare(call: Call) -> Any:
    """The sign of a number does not change with its scale; any other comparison pins."""
    return call.constants() if _is_zero(call["other"]) else call.pin_all()


def glu(call: Call) -> Any:
    """Gated unit a · sigmoid(b): the gate is pinned, the other half passes."""
    x = call.uses.activation(call.first)
    value, gate = x.channels.expand(x.shape).chunk(2, call["dim"])
    call.channels.pin(call.channels.compress(gate), call.label)
    return call.result(value)


def _both_ways(call: Call) -> list[tuple[Value, Value]]:
    first, second = call["self"], call["other"]
    return [(first, second), (second, first)]


def _joined(call: Call) -> Any:
    first, second = call.ids(call["self"]), call.ids(call["other"])
    call.channels.join(first, second, f"shares its scale with a pinned one, through {call.label}")
    return call.result(torch.broadcast_tensors(first, second)[0])


def _is_zero(value: Value) -> bool:
    return isinstance(value, (int, float)) and value == 0


def _is_zero_or_infinite(value: Value) -> bool:
    return isinstance(value, (int, float)) and (value == 0 or math.isinf(value))


_GROUPS: dict[Callable[[Call], Any], str] = {
    layer_rules.linear: "linear addmm",
    layer_rules.matmul: "mm matmul bmm",
    layer_rules.attention: "scaled_dot_product_attention",
    layer_rules.convolution: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
    layer_rules.embedding: "embedding",
    layer_rules.batch_norm: "batch_norm instance_norm",
    layer_rules.mixing_norm: "group_norm layer_norm rms_norm",
    layer_rules.weight_norm: "_weight_norm",
    passes: "relu leaky_relu rrelu prelu abs neg positive dropout feature_dropout native_dropout",
    identity: "to _to_copy clone contiguous detach alias type_as lift_fresh lift_fresh_copy",
    clamp: "clamp clamp_min clamp_max threshold",
    add: "add sub rsub maximum minimum",
    copied: "copy",
    where: "where",
    masked_fill: "masked_fill",
    multiply: "mul multiply",
    divide: "div divide true_divide",
    reduce: "mean sum amax amin cumsum",
    maximum: "max min",
    pool: (
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"
    ),
    pad: "pad constant_pad_nd",
    rearrange: (
        "reshape view _unsafe_view flatten unflatten permute transpose t swapaxes movedim numpy_T mT squeeze unsqueeze "
        "expand repeat tile repeat_interleave stack split split_with_sizes "
        "chunk unbind slice select narrow flip roll pixel_shuffle pixel_unshuffle channel_shuffle diagonal "
        "tensor_split hstack vstack"
    ),
    concatenate: "cat concat",
    like: "expand_as view_as reshape_as",
    index: "index index_select",
    compare: "gt ge lt le eq ne",
    Call.constants: (
        "sign sgn zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones "
        "new_full new_empty sym_size sym_numel size _assert_tensor_metadata _assert_scalar _assert_async"
    ),
    glu: "glu",
}

#: Operation → rule, by the operation's name without overload and in-place underscore; any other is `Call.pin_all`.
RULES = {name: rule for rule, names in _GROUPS.items() for name in names.split()}

_misspelt = [name for name in RULES if not (hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, f"{name}_"))]
assert not _misspelt, f"adiv_optim.gauge has rules for operations that torch {torch.__version__} lacks: {_misspelt}"
