"""Rules for operations with weights: linear maps, convolutions, embeddings, normalisers, gains."""

import math
from typing import Any

from torch import Tensor

from .call import Call, Parameter, Value, pinned, to_dims, uniform
from .graph import Entry

#: Mean of log|w| of a table as PyTorch draws it, N(0, 1): −(γ + log 2) / 2.
NORMAL = -0.6352


def linear(call: Call) -> Any:
    """Linear map, xWᵀ + b or addmm's b + xW."""
    if call.name == "addmm":
        return _weighted(call, call["mat1"], call["mat2"], call["self"], transposed=True)
    return _weighted(call, call["input"], call["weight"], call["bias"])


def matmul(call: Call) -> Any:
    """Product xW with a parameter on the right, or a product of activations one of which no scale touches."""
    left, right = call["self"], call["other"] if call["mat2"] is None else call["mat2"]
    if _is_weight(right) and len(right.shape) == 2 and not isinstance(left, Parameter):
        return _weighted(call, left, right, None, transposed=True)
    left, right = call.ids(left), call.ids(right)
    if min(left.dim(), right.dim()) >= 2:
        for constant, ids, summed in ((left, right, -2), (right, left, -1)):
            if not call.channels.find(constant).any():
                return call.result(call.channels.share(ids, [summed], f"summed by {call.label}"))
    return call.pin_all()


def attention(call: Call) -> Any:
    """softmax(QKᵀ)V: queries and keys are pinned, the values' channels pass."""
    for name, value in call.arguments.items():
        if name != "value":
            call.pin(value)
    if call["value"].shape[:-2] != call.shape[:-2]:  # heads shared by groups of queries
        return call.pin_all()
    return call.result(call.share(call["value"], [-2], "summed by"))


def convolution(call: Call) -> Any:
    """A convolution of any dimension, transposed or not: channels couple only within a group."""
    axis = len(call.shape) + 1 - len(call["weight"].shape)
    transposed = "transpose" in call.name or call["transposed"] is True
    return _weighted(call, call["input"], call["weight"], call["bias"], axis, transposed, call["groups"])


def _weighted(
    call: Call, x: Value, weight: Value, bias: Value, axis: int = -1, transposed: bool = False, groups: int = 1
) -> Any:
    """Every output along an axis is a new channel, every input stays one.

    The weight's dimensions are outputs, inputs of a group and positions; or inputs first, outputs second if transposed.
    """
    if not _is_weight(weight) or (groups > 1 and weight.view.stride() != weight.base.stride()):
        return call.pin_all()
    shape, positions = weight.shape, [1] * (len(weight.shape) - 2)
    into, out = call.vector(x, axis), call.channels.fresh(weight.module, (call.shape[axis],))
    rows, columns = (into, out) if transposed else (out, into)
    rows, columns = rows.view(groups, -1, 1, *positions), columns.view(groups, 1, -1, *positions)
    plus, minus = (columns, rows) if transposed else (rows, columns)
    # PyTorch's fan-in of a transposed convolution is the number that each of its inputs fans out to.
    fan_in = math.prod(shape[1:]) if positions else len(into)
    settings = {"counted": True, "expected_log_weight": uniform(fan_in), "matrix": len(shape) == weight.base.dim()}
    if groups == 1:
        call.move(weight, plus[0], minus[0], **settings)
    else:
        use = Entry((groups, shape[0] // groups, *shape[1:]), plus, minus, **settings)
        call.channels.note(call.channels.parameters, weight.name, use)
    _bias(call, bias, out)
    return call.along(out, axis)


def embedding(call: Call) -> Any:
    """A table: a new channel for every column."""
    weight = call["weight"]
    if not _is_weight(weight):
        return call.pin_all()
    out = call.channels.fresh(weight.module, weight.shape[1:])
    call.move(weight, out[None], counted=True, expected_log_weight=NORMAL, matrix=weight.base.dim() == 2)
    return call.along(out, -1)


def batch_norm(call: Call) -> Any:
    """Per-channel normalisation: the input is free, its scale leaves with the statistics; γ and β scale the output."""
    into = call.vector(call["input"], 1)
    for name, power in (("running_mean", 1), ("running_var", 2)):
        statistic = call[name]
        if buffer := getattr(statistic, "buffer", ""):
            call.channels.note(call.channels.buffers, buffer, Entry(statistic.shape, into, pinned(1), power=power))
        elif statistic is not None:  # it cannot move with the input
            call.pin(statistic)
            call.channels.pin(into, f"no buffer holds the statistics of {call.label}")
    return _normalised(call)


def mixing_norm(call: Call) -> Any:
    """Normalisation across channels: the input is pinned; γ and β scale the output."""
    call.pin(call["input"], f"channels are mixed by {call.label}")
    return _normalised(call)


def _normalised(call: Call) -> Any:
    """γ x̂ + β, where no scale touches x̂ and γ, β have the shape of the channels, or of the last dimensions."""
    weight, bias = call["weight"], call["bias"]
    if not isinstance(weight, Parameter):
        call.pin(weight)
        call.pin(bias)
        return call.constants()
    out = call.channels.fresh(weight.module, weight.core)
    call.move(weight, out, counted=True)
    _bias(call, bias, out)
    return call.result(out) if call.name in ("layer_norm", "rms_norm") else call.along(out, 1)


def _bias(call: Call, value: Value, ids: Tensor) -> None:
    """Let a bias move with the output channels."""
    if isinstance(value, Parameter) and value.core == tuple(ids.shape):
        call.move(value, ids)
    elif value is not None:
        call.channels.join(call.ids(value), ids, f"bias of {call.label}")


def weight_norm(call: Call) -> Any:
    """The weight g v / |v|, with a norm for each position along one dimension or, at −1, one for all."""
    call.share(call["v"], [dim for dim in range(len(call.shape)) if dim != call["dim"]], "one norm at")
    return call.result(call.ids(call["g"]))


def gain(call: Call, value: Value, parameter: Parameter) -> Any:
    """A learned factor: a new channel for each of its elements, if those it multiplies share a scale."""
    ids = call.channels.compress(to_dims(call.ids(value), len(call.shape)))
    core = _core(call, parameter)
    if any(size > 1 and core[dim] == 1 for dim, size in enumerate(ids.shape)):
        call.pin(parameter, f"{call.label} by channels that do not share a scale")
        return call.result(ids)
    out = call.channels.fresh(parameter.name, core)
    call.move(parameter, out, ids, counted=True)
    return call.result(out)


def added(call: Call, value: Value, parameter: Parameter) -> Any:
    """A learned summand, such as a bias or a position: it moves as the other summand does."""
    repeated = [dim for dim, size in enumerate(_core(call, parameter)) if size == 1]
    ids = to_dims(call.ids(value), len(call.shape))
    ids = call.channels.share(ids, repeated, f"{parameter.name} is added to all of them")
    call.move(parameter, ids)
    return call.result(ids)


def _core(call: Call, parameter: Parameter) -> list[int]:
    """Return a parameter's core, with 1 for the dimensions that the output has in front of it."""
    return [1] * (len(call.shape) - len(parameter.core)) + list(parameter.core)


def _is_weight(value: Value) -> bool:
    """Whether it is a parameter with the dimensions of a matrix or a kernel, along which none repeats."""
    return isinstance(value, Parameter) and len(value.shape) >= 2 and value.core == value.shape
