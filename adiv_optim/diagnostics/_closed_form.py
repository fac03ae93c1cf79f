"""Linear layers and convolutions, where a row's own contribution to the gradient is a vector one can write down."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..attach.layers import Corrected, corrected_types, is_transposed, plain_type
from ..corrections import Correction
from ..functional.conv_rows import ConvRows, Geometry
from ..functional.convolutions import per_axis, resolve_padding
from ..functional.linears import LinearRows
from ..functional.patches import unfold
from ._rows import CHUNK, MeasuredRows, evenly, to_float64


def has_closed_form(layer: nn.Module) -> bool:
    """Whether the layer is torch's own linear map or convolution, corrected or not."""
    exact = isinstance(layer, Corrected) or plain_type(layer) in corrected_types()
    return exact and not parametrize.is_parametrized(layer) and "forward" not in layer.__dict__


def closed_rows(
    layer: nn.Module, input: Tensor, grad_output: Tensor, step: Mapping[str, Tensor], max_rows: int
) -> MeasuredRows:
    r"""Measure one call of nn.Linear or nn.Conv1d/2d/3d, with the correction it has attached.

    Every correction is linear in the output gradients, so row k adds :math:`g_k c_k^\top` to the gradient of
    the weight and :math:`b_k g_k` to that of the bias, and moves its own output by

    .. math:: -\eta\, (c_k \cdot x_k + b_k)\, g_k .

    The whole step moves it by :math:`\Delta W x_k + \Delta b`, exactly: the layer is linear in its parameters.

    Args:
        layer: a layer for which `has_closed_form`.
        input: what it was called with.
        grad_output: dL/dz.
        step: parameter → Δθ/η.
        max_rows: how many rows to measure.
    """
    correction = layer._correction if isinstance(layer, Corrected) else None
    weight = layer.get_parameter("weight").detach()
    needs_weight = "weight" in step
    needs_bias = "bias" in step
    dtype = torch.promote_types(weight.dtype, torch.float32)
    input, grad_output = input.to(dtype), grad_output.to(dtype)
    rows: LinearRows | ConvRows
    if is_transposed(layer) and needs_weight:
        step = {**step, "weight": step["weight"].mT}
    if isinstance(layer, nn.Linear) or is_transposed(layer):
        groups = 1
        flat = input.reshape(-1, input.shape[-1])
        rows = LinearRows(flat, grad_output.reshape(-1, grad_output.shape[-1]), needs_weight, needs_bias)
        index = evenly(rows.count, max_rows, input.device)
        x, grad = flat[index].unsqueeze(0), rows.grad_rows[index].unsqueeze(0)
    else:
        rows = _conv_rows(layer, input, grad_output, weight, needs_weight, needs_bias)
        groups = rows.geometry.groups
        index = evenly(rows.count, max_rows // groups, input.device)
        x = _patches(rows, index)
        grad = rows.grad_output.unflatten(1, (groups, -1)).movedim(1, 0).movedim(2, -1).flatten(1, -2)[:, index]
    into_weight, into_bias = _contributions(correction, rows, x, index)
    gains = {"weight": (to_float64(into_weight) * to_float64(x)).sum(-1)} if needs_weight else {}
    gains = {**gains, "bias": to_float64(into_bias)} if needs_bias else gains
    moved = to_float64(torch.zeros_like(grad))
    if needs_weight:
        moved = moved + to_float64(x) @ to_float64(step["weight"]).reshape(groups, -1, x.shape[-1]).mT
    if needs_bias:
        moved = moved + to_float64(step["bias"]).view(groups, 1, -1)
    own = -torch.stack(list(gains.values())).sum(0).unsqueeze(-1) * to_float64(grad)
    return MeasuredRows(
        index=torch.cat([index + group * rows.count for group in range(groups)]),
        total=rows.count * groups,
        grad=to_float64(grad).flatten(0, 1),
        moved=moved.flatten(0, 1),
        own=own.flatten(0, 1),
        gains={name: gain.flatten() for name, gain in gains.items()},
        squared_norm=to_float64(x).square().sum(-1).flatten(),
    )


def _contributions(
    correction: Correction | None, rows: LinearRows | ConvRows, x: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """(c, b) of the rows at `index`: shapes (groups, n, features) and (groups, n)."""
    ones = x.new_ones(x.shape[:-1])
    if correction is None:
        return x, ones
    if type(correction).gradients is Correction.gradients:
        scales = {name: _by_group(scale, len(x))[:, index] for name, scale in correction.scales(rows.factors()).items()}
        found = {"weight": scales["weight"].unsqueeze(-1) * x} if rows.needs_weight else {}
        found = {**found, "bias": scales["bias"]} if rows.needs_bias else found
    else:
        found = _by_unit_gradients(correction, rows, index, len(x))
    return found.get("weight", x).reshape(x.shape), found.get("bias", ones).reshape(ones.shape)


def _by_unit_gradients(
    correction: Correction, rows: LinearRows | ConvRows, index: Tensor, groups: int
) -> dict[str, Tensor]:
    """Let the rule itself say what each row contributes, by giving every row an output of its own.

    With G the identity, grad_W = Σ_k e_k c_kᵀ is the matrix of all contributions. It holds for any rule, and for
    `BatchIdeal` it is a solve with as many right-hand sides as rows are measured.
    """
    found: dict[str, list[Tensor]] = {}
    for part in index.split(max(1, CHUNK // (rows.count * groups))):
        unit = torch.zeros(rows.count, len(part), dtype=_dtype(rows), device=part.device)
        unit[part, torch.arange(len(part), device=part.device)] = 1
        if isinstance(rows, LinearRows):
            one_each: LinearRows | ConvRows = LinearRows(rows.rows, unit, rows.needs_weight, rows.needs_bias)
        else:
            shape = rows.grad_output.shape
            channels = unit.unflatten(0, (shape[0], *shape[2:])).movedim(-1, 1)
            channels = channels.repeat(1, groups, *[1] * (len(shape) - 2))
            weight = rows.weight.new_empty(groups * len(part), *rows.weight.shape[1:])
            one_each = ConvRows(rows.input, channels, weight, rows.geometry, rows.needs_weight, rows.needs_bias)
        for name, gradient in correction.gradients(one_each).items():
            found.setdefault(name, []).append(gradient.unflatten(0, (groups, len(part))))
    return {name: torch.cat(parts, 1) for name, parts in found.items()}


def _dtype(rows: LinearRows | ConvRows) -> torch.dtype:
    return rows.rows.dtype if isinstance(rows, LinearRows) else rows.input.dtype


def _by_group(scale: Tensor, groups: int) -> Tensor:
    """(rows,) or (N, groups, *positions) → (groups, rows)."""
    return scale.unsqueeze(0) if scale.dim() == 1 else scale.movedim(1, 0).reshape(groups, -1)


def _conv_rows(
    layer: nn.Module, input: Tensor, grad_output: Tensor, weight: Tensor, needs_weight: bool, needs_bias: bool
) -> ConvRows:
    """The patches as the corrected layer sees them: batched, its padding turned into numbers."""
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    dims = len(layer.kernel_size)
    if input.dim() == dims + 1:
        input, grad_output = input.unsqueeze(0), grad_output.unsqueeze(0)
    padding: int | str | tuple[int, ...] | list[int] = layer.padding
    if layer.padding_mode != "zeros":
        input, padding = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0
    stride, dilation = per_axis(layer.stride, dims), per_axis(layer.dilation, dims)
    if isinstance(padding, str):
        input, padding = resolve_padding(type(layer).__name__, padding, input, weight.shape[2:], stride, dilation)
    geometry = Geometry(stride, per_axis(padding, dims), dilation, layer.groups)
    return ConvRows(input, grad_output, weight, geometry, needs_weight, needs_bias)


def _patches(rows: ConvRows, index: Tensor) -> Tensor:
    """The patches at `index`, a few samples unfolded at a time: (groups, n, features)."""
    features = math.prod(rows.weight.shape[1:])
    positions = math.prod(rows.grad_output.shape[2:])
    step = max(1, CHUNK // (positions * features * rows.geometry.groups))
    found = []
    for start in range(0, len(rows.input), step):
        here = index[(index >= start * positions) & (index < (start + step) * positions)] - start * positions
        if len(here):
            found.append(unfold(rows.input[start : start + step], rows.weight.shape[2:], *rows.geometry)[:, here])
    return torch.cat(found, 1)
