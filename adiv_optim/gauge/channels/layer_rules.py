"""Rules for operations that own weights: linear maps, convolutions, embeddings, normalisers, gains."""

from typing import Any

import torch
from torch import Tensor

from .call import Call
from .channels import PINNED
from .values import Activation, Parameter, Value

#: An eps that no variance in float64 will notice. torch refuses 0 itself in training from 2.15 on.
NEGLIGIBLE = 1e-20


def linear(call: Call) -> Any:
    """Linear map xWᵀ + b: a new channel for every output, every input its own."""
    return _matrix(call, call["input"], call["weight"], call["bias"], out=0)


def addmm(call: Call) -> Any:
    """B + xW."""
    return _matrix(call, call["mat1"], call["mat2"], call["self"], out=1)


def matmul(call: Call) -> Any:
    """Product xW with a parameter on the right, or a product of activations one of which no scale touches."""
    left, right = call.arguments["self"], next(v for k, v in call.arguments.items() if k in ("other", "mat2", "vec"))
    if _is_matrix(right) and not isinstance(left, Parameter):
        return _matrix(call, left, right, None, out=1)
    left, right = call.activation(left), call.activation(right)
    if min(len(left.shape), len(right.shape)) < 2:
        return call.pin_all()
    if call.channels.is_pinned(left.channels):
        return call.result(call.channels.share(right.channels, [-2], f"summed by {call.label}"))
    if call.channels.is_pinned(right.channels):
        return call.result(call.channels.share(left.channels, [-1], f"summed by {call.label}"))
    return call.pin_all()


def attention(call: Call) -> Any:
    """softmax(QKᵀ)V: queries and keys are pinned, the values' channels pass."""
    for name, value in call.arguments.items():
        if name != "value" and isinstance(value, (Activation, Parameter)):
            call.pin(value)
    value = call.activation(call["value"])
    if value.shape[:-2] != call.shape[:-2]:  # heads shared by groups of queries
        return call.pin_all()
    return call.result(call.channels.share(value.channels, [-2], f"summed by {call.label}"))


def convolution(call: Call) -> Any:
    """A convolution of any dimension, transposed or not: channels couple only within a group."""
    weight = call["weight"]
    transposed = "transpose" in call.name or call["transposed"] is True
    if not isinstance(weight, Parameter) or not weight.plain:
        return call.pin_all()
    groups, kernel = call["groups"], len(weight.base.shape) - 2
    x = call.activation(call["input"])
    into = call.vector(x, len(x.shape) - kernel - 1).view(groups, -1)
    channels_out = call.shape[len(x.shape) - kernel - 1]
    out = call.fresh(weight, (channels_out,))
    first, second = (into, out.view(groups, -1)) if transposed else (out.view(groups, -1), into)
    ones = [1] * kernel
    first = first.reshape(groups, -1, 1, *ones)
    second = second.reshape(groups, 1, -1, *ones)
    shape = (groups, first.shape[1], second.shape[2], *weight.base.shape[2:])
    if groups == 1:
        first, second, shape = first[0], second[0], shape[1:]
    plus, minus = (second, first) if transposed else (first, second)
    call.uses.grouped(weight, "transposed convolution" if transposed else "convolution", shape, plus, minus)
    call.bias(call["bias"], out)
    return call.along(out, len(x.shape) - kernel - 1)


def embedding(call: Call) -> Any:
    """A table: a new channel for every column."""
    weight = call["weight"]
    if not _is_matrix(weight):
        return call.pin_all()
    out = call.fresh(weight, (weight.view.shape[1],))
    call.uses.parameter(weight, "table", out[None], torch.full((1, 1), PINNED), counted=True)
    return call.along(out, -1)


def batch_norm(call: Call) -> Any:
    """Per-channel normalisation: the input is free, its scale leaves with the statistics; γ and β scale the output."""
    x = call.activation(call["input"])
    into = call.vector(x, 1)
    for name, power in (("running_mean", 1), ("running_var", 2)):
        if call[name] is not None:
            call.uses.buffer(call[name], into, power)
    if call["eps"] > NEGLIGIBLE:
        call.uses.inexact.append(call.where)
    return _normalised(call, 1)


def group_norm(call: Call) -> Any:
    """Normalisation across channels: the input is pinned; γ and β scale the output."""
    call.pin(call.activation(call["input"]), f"channels are mixed by {call.label}")
    return _normalised(call, 1)


def layer_norm(call: Call) -> Any:
    """LayerNorm and RMSNorm: the input is pinned; γ and β scale the output."""
    call.pin(call.activation(call["input"]), f"channels are mixed by {call.label}")
    return _normalised(call, None)


def _normalised(call: Call, axis: int | None) -> Any:
    """γ x̂ + β, where no scale touches x̂ and γ, β have the shape of one axis, or of the last ones."""
    weight, bias = call["weight"], call["bias"]
    if not isinstance(weight, Parameter):
        for value in (weight, bias):
            call.pin(value)
        return call.constants()
    out = call.fresh(weight, weight.core)
    call.uses.parameter(weight, "gain of a constant", out, torch.full([1] * out.dim(), PINNED), counted=True)
    if isinstance(bias, Parameter):
        call.uses.parameter(bias, "bias", out, torch.full([1] * out.dim(), PINNED), counted=False)
    elif bias is not None:
        call.channels.join(call.activation(bias).channels, out, f"bias of {call.label}")
    return call.result(out) if axis is None else call.along(out, axis)


def weight_norm(call: Call) -> Any:
    """The weight g v / |v|, with a norm for each position along one dimension or, at −1, one for all."""
    v = call.activation(call["v"])
    others = [dim for dim in range(len(v.shape)) if dim != call["dim"]]
    call.channels.share(v.channels, others, f"one norm at {call.label}")
    return call.result(call.activation(call["g"]).channels)


def prelu(call: Call) -> Any:
    """The slope moves with nothing; channels pass."""
    call.pin(call["weight"])
    return call.result(call.activation(call["self"]).channels)


def gain(call: Call, value: Value, parameter: Parameter) -> Any:
    """A learned factor: a new channel for each of its elements, if those it multiplies share a scale."""
    x = call.activation(value)
    dims = len(call.shape)
    ids = call.channels.compress(_to_dims(x.channels, dims))
    core = [1] * (dims - parameter.view.dim()) + list(parameter.core)
    if any(size > 1 and core[dim] == 1 for dim, size in enumerate(ids.shape)):
        call.uses.fixed(parameter, f"{call.label} by channels that do not share a scale")
        return call.result(ids)
    out = call.channels.fresh(parameter.name, core)
    lead = dims - parameter.view.dim()
    plus, minus = (index.reshape(index.shape[lead:]) for index in (out, ids))
    call.uses.parameter(parameter, "gain", plus, minus, counted=True)
    return call.result(out)


def added(call: Call, value: Value, parameter: Parameter) -> Any:
    """A learned summand, such as a bias or a position: it moves as what it is added to."""
    x = call.activation(value)
    dims = len(call.shape)
    core = [1] * (dims - parameter.view.dim()) + list(parameter.core)
    ids = _to_dims(x.channels, dims)
    ids = call.channels.share(
        ids, [dim for dim in range(dims) if core[dim] == 1], f"{parameter.name} is added to all of them"
    )
    index = ids.reshape(ids.shape[dims - parameter.view.dim() :])
    call.uses.parameter(parameter, "bias", index, torch.full([1] * index.dim(), PINNED), counted=False)
    return call.result(ids)


def _matrix(call: Call, x: Value, weight: Value, bias: Value, out: int) -> Any:
    """One fresh channel for each output, `out` being the weight's dimension that counts them."""
    if not _is_matrix(weight):
        return call.pin_all()
    into = call.vector(call.activation(x), -1)
    ids = call.fresh(weight, (weight.view.shape[out],))
    plus, minus = (ids[:, None], into[None]) if out == 0 else (ids[None], into[:, None])
    call.uses.parameter(weight, "matrix", plus, minus, counted=True)
    call.bias(bias, ids)
    return call.along(ids, -1)


def _is_matrix(value: Value) -> bool:
    return isinstance(value, Parameter) and value.view.dim() == 2 and value.core == tuple(value.view.shape)


def _to_dims(ids: Tensor, dims: int) -> Tensor:
    return ids.reshape([1] * (dims - ids.dim()) + list(ids.shape))


RULES = {
    "linear": linear,
    "addmm": addmm,
    "mm": matmul,
    "matmul": matmul,
    "bmm": matmul,
    "scaled_dot_product_attention": attention,
    "conv1d": convolution,
    "conv2d": convolution,
    "conv3d": convolution,
    "conv_transpose1d": convolution,
    "conv_transpose2d": convolution,
    "conv_transpose3d": convolution,
    "convolution": convolution,
    "embedding": embedding,
    "batch_norm": batch_norm,
    "instance_norm": batch_norm,
    "group_norm": group_norm,
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "prelu": prelu,
    "_weight_norm": weight_norm,
}
