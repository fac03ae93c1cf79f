"""Rules for operations without weights: what passes a scale, shares it, moves it about, or pins it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import layer_rules
from .call import Call
from .values import Activation, Buffer, Parameter, Value


def passes(call: Call) -> Any:
    """f(sx) = s f(x), element by element."""
    return call.result(call.activation(call.first).channels)


def identity(call: Call) -> Any:
    """The same values, maybe elsewhere or in another precision."""
    if isinstance(call.output, Tensor) and not call.output.is_floating_point():
        return call.pin_all(f"cast to {call.output.dtype} in {call.where}")
    return call.first if isinstance(call.first, Parameter) else passes(call)


def clamp(call: Call) -> Any:
    """Homogeneous with no other bound than 0."""
    bounds = [bound for name, bound in list(call.arguments.items())[1:] if bound is not None]
    return passes(call) if all(_is_number(bound, 0) for bound in bounds) else call.pin_all()


def threshold(call: Call) -> Any:
    """Homogeneous where both the threshold and what replaces values below it are 0."""
    return clamp(call)


def add(call: Call) -> Any:
    """Summands share their scale; so do the two of a difference, a maximum or a minimum."""
    first, second = call.arguments["self"], call["other"]
    for value, other in ((first, second), (second, first)):
        if isinstance(value, Parameter) and isinstance(other, Activation) and _broadcasts(call, value):
            return layer_rules.added(call, other, value)
    for value, other in ((first, second), (second, first)):
        if isinstance(value, (int, float)):
            if value != 0:
                call.pin(call.activation(other), f"{call.label} with a constant")
            return call.result(call.activation(other).channels)
    return _joined(call, first, second)


def copy(call: Call) -> Any:
    """Writing one tensor over another: its scale goes with it."""
    return call.result(call.activation(call["src"]).channels)


def where(call: Call) -> Any:
    """A choice between two activations: they share their scale."""
    call.pin(call["condition"])
    values = [call["self"], call["other"]]
    for value, other in (values, values[::-1]):
        if isinstance(value, (int, float)) and (value == 0 or math.isinf(value)):
            return call.result(call.activation(other).channels)
    if not all(isinstance(value, (Activation, Parameter, Buffer)) for value in values):
        return call.pin_all()
    return _joined(call, *values)


def masked_fill(call: Call) -> Any:
    """Filling with 0 or infinity passes."""
    call.pin(call["mask"])
    value = call["value"]
    if not isinstance(value, (int, float)) or not (value == 0 or math.isinf(value)):
        return call.pin_all()
    return passes(call)


def multiply(call: Call) -> Any:
    """A product has the scale of one factor where no scale touches the other; a parameter is a gain."""
    first, second = call.arguments["self"], call["other"]
    for value, other in ((first, second), (second, first)):
        if isinstance(value, (int, float)):
            return call.result(call.activation(other).channels)
        if isinstance(value, Parameter) and isinstance(other, (Activation, Buffer)) and _broadcasts(call, value):
            return layer_rules.gain(call, other, value)
    for value in (first, second):
        if isinstance(value, Parameter):  # the product of two parameters
            return call.pin_all()
    first, second = (call.channels.find(call.activation(value).channels) for value in (first, second))
    first, second = torch.broadcast_tensors(*_same_dims(first, second))
    free = (first != 0) & (second != 0)
    if bool(free.any()):
        call.channels.pin(first[free], f"multiplied by another activation: {call.label}")
        call.channels.pin(second[free], f"multiplied by another activation: {call.label}")
    return call.result(torch.maximum(call.channels.find(first), call.channels.find(second)))


def divide(call: Call) -> Any:
    """A quotient has the scale of its numerator; what divides is pinned."""
    if call["rounding_mode"] is not None or not isinstance(call.first, (Activation, Parameter, Buffer)):
        return call.pin_all()
    call.pin(call["other"])
    return call.result(call.activation(call.first).channels)


def reduce(call: Call) -> Any:
    """What is summed, averaged or compared shares its scale."""
    x = call.activation(call.first)
    dims = call["dim"]
    dims = [dims] if isinstance(dims, int) else list(dims) if dims else list(range(len(x.shape)))
    ids = call.channels.share(x.channels, dims, f"summed or compared by {call.label}")
    if len(call.shape) < ids.dim():
        kept = [dim for dim in range(ids.dim()) if dim not in {dim % ids.dim() for dim in dims}]
        ids = ids.reshape([ids.shape[dim] for dim in kept])
    return call.result(ids)


def maximum(call: Call) -> Any:
    """torch.max in its three forms."""
    return add(call) if call["other"] is not None else reduce(call)


def pool(call: Call) -> Any:
    """Pooling and resizing over the last dimensions, as many as the name says."""
    x = call.activation(call.first)
    spatial = int(next(letter for letter in call.name if letter.isdigit()))
    ids = call.channels.share(x.channels, range(len(x.shape) - spatial, len(x.shape)), f"positions at {call.label}")
    return call.result(ids)


def pad(call: Call) -> Any:
    """Padding with zeros or with what is there passes; zeros in place of channels are channels of their own."""
    x = call.activation(call.first)
    mode, value = call["mode"] or "constant", call["value"]
    if mode == "constant" and value:
        return call.pin_all(f"padded with {value} in {call.where}")
    ids, amounts = x.channels, list(call["pad"])
    for place, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = ids.dim() - 1 - place
        if ids.shape[dim] == 1 or (before, after) == (0, 0):
            continue
        if mode != "constant" or before < 0 or after < 0:
            ids = call.channels.share(ids, [dim], f"padded by {call.label}")
            continue
        rest = list(ids.shape)
        zeros = [
            call.channels.fresh(f"zeros of {call.where}", [*rest[:dim], n, *rest[dim + 1 :]]) for n in (before, after)
        ]
        ids = torch.cat([zeros[0], ids, zeros[1]], dim)
    return call.result(ids)


def rearrange(call: Call) -> Any:
    """Shape operations: the same operation on a tensor of channel ids tells where each of them goes."""
    found = list(call.tensors())
    if any(isinstance(value, torch.dtype) for value in call.arguments.values()):
        return call.pin_all(f"bits read as another type in {call.where}")
    if len(found) == 1 and isinstance(found[0], Parameter):
        view = call.run(call.operator, lambda value: found[0].view if value is found[0] else value)
        if isinstance(view, Tensor) and view.untyped_storage()._cdata == found[0].base.untyped_storage()._cdata:
            moved = Parameter(found[0].name, found[0].base, view)
            if moved.axes() is not None:
                return moved

    def ids(value: Value) -> Value:
        if isinstance(value, (list, tuple)):
            return [ids(part) for part in value]
        if not isinstance(value, (Activation, Parameter, Buffer)):
            return value
        x = call.activation(value)
        return x.channels.expand(x.shape)

    # A view of ids that were spread out need not exist where that of the activation does.
    by_copy: dict[str, Callable[..., Any]] = {
        "view": torch.reshape,
        "_unsafe_view": torch.reshape,
    }
    moved = call.run(by_copy.get(call.name, call.operator), ids)
    if not isinstance(moved, Tensor):
        return [Activation(tuple(part.shape), call.channels.compress(part)) for part in moved]
    return call.result(moved) if tuple(moved.shape) == call.shape else call.pin_all()


def like(call: Call) -> Any:
    """Taking the shape of another tensor, of which nothing but the shape matters."""
    operator = torch.ops.aten.expand.default if call.name == "expand_as" else torch.ops.aten.reshape.default
    arguments = {"self": call.first, "size": list(call.shape), "implicit": False}
    if call.name != "expand_as":
        arguments = {"self": call.first, "shape": list(call.shape)}
    return rearrange(Call(operator, call.name, arguments, call.output, call.where, call.channels, call.uses))


def index(call: Call) -> Any:
    """Picking positions: all along the indexed dimension share their scale, then any index finds the same."""
    x, dims = call.activation(call.first), call["dim"]
    indices = call["index"] if call["index"] is not None else call["indices"]
    positions = list(indices) if isinstance(indices, (list, tuple)) else None
    dims = [dims] if positions is None else [dim for dim, one in enumerate(positions) if one is not None]
    ids = call.channels.share(x.channels, dims, f"picked by {call.label}").expand(x.shape)
    if positions is None:
        return call.result(call.operator(ids, dims[0], torch.zeros(indices.shape, dtype=torch.long)))
    at = [None if one is None else torch.zeros(one.shape, dtype=torch.long) for one in positions]
    moved = torch.ops.aten.index.Tensor(ids, at)
    # A mask is no position: how many it keeps is in its values.
    return call.result(moved) if tuple(moved.shape) == call.shape else call.pin_all()


def compare(call: Call) -> Any:
    """The sign of a number does not change with its scale; any other comparison pins."""
    return call.constants() if _is_number(call["other"], 0) else call.pin_all()


def sign(call: Call) -> Any:
    """A function that no scale touches."""
    return call.constants()


def glu(call: Call) -> Any:
    """Gated unit a · sigmoid(b): the gate is pinned, the other half passes."""
    x = call.activation(call.first)
    half = x.shape[call["dim"]] // 2
    value, gate = x.channels.expand(x.shape).split(half, call["dim"])
    call.channels.pin(call.channels.compress(gate), call.label)
    return call.result(value)


def known_pin(call: Call) -> Any:
    """Not positively homogeneous, and known not to be."""
    return call.pin_all()


def nothing(call: Call) -> Any:
    """An assertion about a tensor."""
    return None


def _joined(call: Call, first: Value, second: Value) -> Any:
    first, second = _same_dims(*(call.activation(value).channels for value in (first, second)))
    call.channels.join(first, second, f"shares its scale with what is pinned, through {call.label}")
    return call.result(torch.broadcast_tensors(first, second)[0])


def _same_dims(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    dims = max(first.dim(), second.dim())
    first, second = (ids.reshape([1] * (dims - ids.dim()) + list(ids.shape)) for ids in (first, second))
    return first, second


def _broadcasts(call: Call, value: Parameter) -> bool:
    return value.view.dim() <= len(call.shape)


def _is_number(value: Value, number: float) -> bool:
    return isinstance(value, (int, float)) and value == number


_GROUPS: dict[Callable[[Call], Any], str] = {
    passes: "relu leaky_relu rrelu abs neg positive dropout feature_dropout native_dropout rad2deg deg2rad",
    identity: "to _to_copy clone contiguous detach alias type_as lift_fresh lift_fresh_copy float double half bfloat16",
    clamp: "clamp clamp_min clamp_max",
    threshold: "threshold",
    add: "add sub rsub maximum minimum",
    copy: "copy",
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
        "expand repeat tile repeat_interleave cat concat stack split split_with_sizes "
        "chunk unbind slice select narrow flip roll pixel_shuffle pixel_unshuffle channel_shuffle diagonal "
        "tensor_split hstack vstack"
    ),
    like: "expand_as view_as reshape_as",
    index: "index index_select",
    compare: "gt ge lt le",
    sign: (
        "sign sgn heaviside zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones "
        "new_full new_empty sym_size sym_numel size"
    ),
    glu: "glu",
    known_pin: (
        "sigmoid tanh gelu silu softmax log_softmax hardtanh relu6 hardswish hardsigmoid mish elu selu celu softplus "
        "softsign logsigmoid log_sigmoid hardshrink softshrink tanhshrink exp expm1 log log1p log2 log10 sqrt rsqrt "
        "reciprocal square pow sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc norm linalg_vector_norm "
        "var std var_mean std_mean prod logsumexp cumprod floor ceil round trunc frac fmod remainder argmax argmin "
        "argsort sort topk eq ne alpha_dropout feature_alpha_dropout baddbmm local_response_norm "
        "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell embedding_bag "
        "cross_entropy_loss nll_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
        "binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity cdist"
    ),
    nothing: "_assert_tensor_metadata _assert_scalar _assert_async",
}

#: Operation → rule, by the operation's name without overload and in-place underscore.
RULES: dict[str, Callable[[Call], Any]] = {
    **{name: rule for rule, names in _GROUPS.items() for name in names.split()},
    **layer_rules.RULES,
}
