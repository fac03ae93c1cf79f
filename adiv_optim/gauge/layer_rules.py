"""Rules for operations with weights: linear maps, convolutions, embeddings, normalisers, gains."""

from typing import Any

from .call import Activation, Call, Parameter, Value, to_dims, uniform
from .graph import Entry, pinned

#: Mean of log|w| of a table as PyTorch draws it, N(0, 1): −(γ + log 2) / 2.
NORMAL = -0.6352


def linear(call: Call) -> Any:
    """Linear map, xWᵀ + b or addmm's b + xW: every output is a new channel, every input stays a channel."""
    if call.name == "addmm":
        return _matrix(call, call["mat1"], call["mat2"], call["self"], out=1)
    return _matrix(call, call["input"], call["weight"], call["bias"], out=0)


def matmul(call: Call) -> Any:
    """Product xW with a parameter on the right, or a product of activations one of which no scale touches."""
    left, right = call["self"], call["other"] if call["mat2"] is None else call["mat2"]
    if _is_matrix(right) and not isinstance(left, Parameter):
        return _matrix(call, left, right, None, out=1)
    left, right = call.uses.activation(left), call.uses.activation(right)
    if min(len(left.shape), len(right.shape)) >= 2:
        for constant, value, summed in ((left, right, -2), (right, left, -1)):
            if call.channels.is_pinned(constant.channels):
                return call.result(call.share(value, [summed], "summed by"))
    return call.pin_all()


def attention(call: Call) -> Any:
    """softmax(QKᵀ)V: queries and keys are pinned, the values' channels pass."""
    for name, value in call.arguments.items():
        if name != "value":
            call.pin(value)
    value = call.uses.activation(call["value"])
    if value.shape[:-2] != call.shape[:-2]:  # heads shared by groups of queries
        return call.pin_all()
    return call.result(call.share(value, [-2], "summed by"))


def convolution(call: Call) -> Any:
    """A convolution of any dimension, transposed or not: channels couple only within a group."""
    weight = call["weight"]
    transposed = "transpose" in call.name or call["transposed"] is True
    if not isinstance(weight, Parameter) or not weight.plain:
        return call.pin_all()
    groups, kernel = call["groups"], weight.base.shape[2:]
    axis = len(call.shape) - len(kernel) - 1
    into, out = call.vector(call["input"], axis), call.fresh(weight, (call.shape[axis],))
    # The weight's first dimension counts outputs, or inputs if transposed.
    rows, columns = (into, out) if transposed else (out, into)
    rows = rows.reshape(groups, -1, *[1] * (len(kernel) + 1))
    columns = columns.reshape(groups, 1, -1, *[1] * len(kernel))
    shape = (groups, rows.shape[1], columns.shape[2], *kernel)
    if groups == 1:
        rows, columns, shape = rows[0], columns[0], shape[1:]
    kind, plus, minus = ("transposed convolution", columns, rows) if transposed else ("convolution", rows, columns)
    # PyTorch's fan-in of a transposed convolution is the number that each of its inputs fans out to.
    expected = uniform(weight.base.shape[1:].numel())
    kind = f"{kind} {tuple(plus.shape)}"
    use = Entry(shape, plus, minus, True, expected_log_weight=expected, matrix=True, kind=kind)
    call.uses.note(call.uses.parameters, weight.name, use)
    call.bias(call["bias"], out)
    return call.along(out, axis)


def embedding(call: Call) -> Any:
    """A table: a new channel for every column."""
    weight = call["weight"]
    if not _is_matrix(weight):
        return call.pin_all()
    out = call.fresh(weight, (weight.view.shape[1],))
    settings = {"counted": True, "expected_log_weight": NORMAL, "matrix": weight.base.dim() == 2}
    call.uses.parameter(weight, "table", out[None], **settings)
    return call.along(out, -1)


def batch_norm(call: Call) -> Any:
    """Per-channel normalisation: the input is free, its scale leaves with the statistics; γ and β scale the output."""
    into = call.vector(call["input"], 1)
    for name, power in (("running_mean", 1), ("running_var", 2)):
        statistic = call[name]
        if isinstance(statistic, Activation) and statistic.buffer:
            use = Entry(statistic.shape, into, pinned(1), power=power, kind=name)
            call.uses.note(call.uses.buffers, statistic.buffer, use)
        elif statistic is not None:  # it cannot move with the input
            call.pin(statistic)
            call.channels.pin(into, f"no buffer holds the statistics of {call.label}")
    return _normalised(call)


def mixing_norm(call: Call) -> Any:
    """Normalisation across channels: the input is pinned; γ and β scale the output."""
    call.pin(call.uses.activation(call["input"]), f"channels are mixed by {call.label}")
    return _normalised(call)


def _normalised(call: Call) -> Any:
    """γ x̂ + β, where no scale touches x̂ and γ, β have the shape of the channels, or of the last dimensions."""
    weight, bias = call["weight"], call["bias"]
    if not isinstance(weight, Parameter):
        for value in (weight, bias):
            call.pin(value)
        return call.constants()
    out = call.fresh(weight, weight.core)
    call.uses.parameter(weight, "gain of a constant", out, counted=True)
    call.bias(bias, out)
    return call.result(out) if call.name in ("layer_norm", "rms_norm") else call.along(out, 1)


def weight_norm(call: Call) -> Any:
    """The weight g v / |v|, with a norm for each position along one dimension or, at −1, one for all."""
    v = call.uses.activation(call["v"])
    call.share(v, [dim for dim in range(len(v.shape)) if dim != call["dim"]], "one norm at")
    return call.result(call.ids(call["g"]))


def gain(call: Call, value: Value, parameter: Parameter) -> Any:
    """A learned factor: a new channel for each of its elements, if those it multiplies share a scale."""
    ids = call.channels.compress(to_dims(call.ids(value), len(call.shape)))
    lead, core = _aligned(call, parameter)
    if any(size > 1 and core[dim] == 1 for dim, size in enumerate(ids.shape)):
        call.uses.fixed(parameter, f"{call.label} by channels that do not share a scale")
        return call.result(ids)
    out = call.channels.fresh(parameter.name, core)
    plus, minus = (index.reshape(index.shape[lead:]) for index in (out, ids))
    call.uses.parameter(parameter, "gain", plus, minus, counted=True)
    return call.result(out)


def added(call: Call, value: Value, parameter: Parameter) -> Any:
    """A learned summand, such as a bias or a position: it moves as the other summand does."""
    lead, core = _aligned(call, parameter)
    repeated = [dim for dim, size in enumerate(core) if size == 1]
    ids = to_dims(call.ids(value), len(call.shape))
    ids = call.channels.share(ids, repeated, f"{parameter.name} is added to all of them")
    call.uses.parameter(parameter, "bias", ids.reshape(ids.shape[lead:]))
    return call.result(ids)


def _aligned(call: Call, parameter: Parameter) -> tuple[int, list[int]]:
    """Return how many dimensions the output has in front of a parameter's, and the core with 1 for them."""
    lead = len(call.shape) - parameter.view.dim()
    return lead, [1] * lead + list(parameter.core)


def _matrix(call: Call, x: Value, weight: Value, bias: Value, out: int) -> Any:
    """A new channel for each output; `out` is the weight's dimension that counts them."""
    if not _is_matrix(weight):
        return call.pin_all()
    into = call.vector(x, -1)
    ids = call.fresh(weight, (weight.view.shape[out],))
    plus, minus = (ids[:, None], into[None]) if out == 0 else (ids[None], into[:, None])
    settings = {"counted": True, "expected_log_weight": uniform(len(into)), "matrix": weight.base.dim() == 2}
    call.uses.parameter(weight, "matrix", plus, minus, **settings)
    call.bias(bias, ids)
    return call.along(ids, -1)


def _is_matrix(value: Value) -> bool:
    return isinstance(value, Parameter) and value.view.dim() == 2 and value.core == tuple(value.view.shape)
