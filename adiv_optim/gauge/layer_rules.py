"""Rules for operations with weights: linear maps, convolutions, embeddings, normalisers, learned factors."""

import math
from typing import Any

from torch import Tensor

from .call import Call, ParameterView, Value, mean_log_uniform, to_dims
from .channels import pinned
from .graph import Entry

#: Of weights N(0, 1), as PyTorch draws tables of embeddings: −(γ + log 2) / 2.
MEAN_LOG_NORMAL = -0.6352


def linear(call: Call) -> Any:
    """Treat a linear map, xWᵀ + b or addmm's b + xW: every output is a new channel."""
    if call.name == "addmm":
        return _weighted(call, call["mat1"], call["mat2"], call["self"], transposed=True)
    return _weighted(call, call["input"], call["weight"], call["bias"])


def matmul(call: Call) -> Any:
    """Treat xW with a parameter on the right as a linear map; let scales pass in a product with a constant."""
    left, right = call["self"], call["other"] if call["mat2"] is None else call["mat2"]
    if _is_weight(right) and len(right.shape) == 2 and not isinstance(left, ParameterView):
        return _weighted(call, left, right, None, transposed=True)
    left, right = call.ids(left), call.ids(right)
    if min(left.dim(), right.dim()) >= 2:
        for constant, ids, summed_dim in ((left, right, -2), (right, left, -1)):
            if not call.channels.find(constant).any():
                return call.result(call.channels.join_along(ids, [summed_dim], f"summed by {call.label}"))
    return call.pin_all()


def attention(call: Call) -> Any:
    """Pin the queries and keys of softmax(QKᵀ)V, and let the values' channels pass."""
    for name, value in call.arguments.items():
        if name != "value":
            call.pin(value)
    if call["value"].shape[:-2] != call.shape[:-2]:  # heads shared by groups of queries
        return call.pin_all()
    return call.result(call.join_along(call["value"], [-2], "summed by"))


def convolution(call: Call) -> Any:
    """Treat a convolution of any dimension, transposed or not, as a linear map of the channels of each group."""
    axis = len(call.shape) + 1 - len(call["weight"].shape)
    transposed = "transpose" in call.name or call["transposed"] is True
    return _weighted(call, call["input"], call["weight"], call["bias"], axis, transposed, call["groups"])


def _weighted(
    call: Call, x: Value, weight: Value, bias: Value, axis: int = -1, transposed: bool = False, groups: int = 1
) -> Any:
    """Move a weight by the inputs and by new channels of the outputs, which lie along an axis.

    The weight's dimensions are outputs, inputs of a group and positions; or inputs first, outputs second if transposed.
    """
    if not _is_weight(weight) or (groups > 1 and weight.view.stride() != weight.base.stride()):
        return call.pin_all(f"{call.label} by a weight that is computed or cut")
    shape, ones = weight.shape, [1] * (len(weight.shape) - 2)
    inputs, outputs = call.ids_along(x, axis), call.channels.fresh((call.shape[axis],))
    rows, columns = [groups, -1, 1, *ones], [groups, 1, -1, *ones]
    plus, minus = outputs.view(columns if transposed else rows), inputs.view(rows if transposed else columns)
    # PyTorch's fan-in of a transposed convolution is the number that each of its inputs fans out to.
    fan_in = math.prod(shape[1:]) if ones else len(inputs)
    has_kernel_last = set((weight.axes() or [])[:2]) <= {0, 1, -1}  # else one for each output, not position, is wanted
    is_matrix = len(shape) == weight.base.dim() and has_kernel_last
    settings: dict[str, Any] = {"counted": True, "expected_log_weight": mean_log_uniform(fan_in), "matrix": is_matrix}
    if groups == 1:
        call.move(weight, plus[0], minus[0], **settings)
    else:
        use = Entry((groups, shape[0] // groups, *shape[1:]), plus, minus, **settings)
        call.channels.record(call.channels.parameters, weight.name, use)
    _move_bias(call, bias, outputs)
    return call.result_along(outputs, axis)


def embedding(call: Call) -> Any:
    """Give every column of a table a new channel."""
    weight = call["weight"]
    if not _is_weight(weight):
        return call.pin_all()
    out = call.channels.fresh(weight.shape[1:])
    call.move(weight, out[None], counted=True, expected_log_weight=MEAN_LOG_NORMAL, matrix=weight.base.dim() == 2)
    return call.result_along(out, -1)


def batch_norm(call: Call) -> Any:
    """Leave the input of a normalisation by channel free: its statistics take its scale; γ and β scale the output."""
    inputs = call.ids_along(call["input"], 1)
    for name, power in (("running_mean", 1), ("running_var", 2)):
        statistic = call[name]
        if buffer := getattr(statistic, "buffer", ""):
            call.channels.record(call.channels.buffers, buffer, Entry(statistic.shape, inputs, pinned(1), power=power))
        elif statistic is not None:  # it cannot move with the input
            call.pin(statistic)
            call.channels.pin(inputs, f"no buffer holds the statistics of {call.label}")
    return _normalised(call)


def norm_across_channels(call: Call) -> Any:
    """Pin the input of a normalisation across channels; γ and β scale the output."""
    call.pin(call["input"], f"channels are mixed by {call.label}")
    return _normalised(call)


def _normalised(call: Call) -> Any:
    """Give each element of γ in γ x̂ + β a new channel, along dimension 1 or, in a layer norm, along the last ones."""
    weight, bias = call["weight"], call["bias"]
    if not isinstance(weight, ParameterView):
        call.pin(weight)
        call.pin(bias)
        return call.constants()
    out = call.channels.fresh(weight.distinct_shape)
    call.move(weight, out, counted=True)
    _move_bias(call, bias, out)
    return call.result(out) if call.name in ("layer_norm", "rms_norm") else call.result_along(out, 1)


def _move_bias(call: Call, value: Value, ids: Tensor) -> None:
    """Let a bias move by the output channels."""
    if isinstance(value, ParameterView) and value.distinct_shape == tuple(ids.shape):
        call.move(value, ids)
    elif value is not None:
        call.channels.join(call.ids(value), ids, f"bias of {call.label}")


def multiply_by_parameter(call: Call, value: Value, parameter: ParameterView) -> Any:
    """Give each element of a learned factor a new channel, if those it multiplies share a scale."""
    ids = call.channels.compress(to_dims(call.ids(value), len(call.shape)))
    shape = _aligned_shape(call, parameter)
    if any(size > 1 and shape[dim] == 1 for dim, size in enumerate(ids.shape)):
        call.pin(parameter, f"{call.label} by channels that do not share a scale")
        return call.result(ids)
    out = call.channels.fresh(shape)
    call.move(parameter, out, ids, counted=True)
    return call.result(out)


def add_parameter(call: Call, value: Value, parameter: ParameterView) -> Any:
    """Let a learned summand, such as a bias or a position, move as the other summand does."""
    repeated = [dim for dim, size in enumerate(_aligned_shape(call, parameter)) if size == 1]
    ids = to_dims(call.ids(value), len(call.shape))
    ids = call.channels.join_along(ids, repeated, f"{parameter.name} is added to all of them")
    call.move(parameter, ids)
    return call.result(ids)


def _aligned_shape(call: Call, parameter: ParameterView) -> list[int]:
    """Return the distinct shape of a parameter, with 1 for the dimensions that the output has in front of it."""
    return [1] * (len(call.shape) - len(parameter.distinct_shape)) + list(parameter.distinct_shape)


def _is_weight(value: Value) -> bool:
    """Whether it is a parameter with the dimensions of a matrix or a kernel, along which none repeats."""
    return isinstance(value, ParameterView) and len(value.shape) >= 2 and value.distinct_shape == value.shape
