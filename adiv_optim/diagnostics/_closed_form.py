"""Linear layers and convolutions, where a row's own contribution to the gradient is a vector one can write down."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..attach.layers import Corrected, Layout, why_unknown_rows
from ..attach.rows import rows_of
from ..corrections import Correction
from ..functional.conv_rows import ConvRows
from ..functional.linears import LinearRows
from ..jacobian.recorder import Call
from ._rows import MeasuredRows, evenly, to_float64

#: A rule is asked for the contributions of a few rows at a time: output gradients of at most so many numbers.
UNIT_NUMBERS = 2**22


def has_closed_form(layer: nn.Module) -> bool:
    """Whether the layer is torch's own linear map or convolution, corrected or not."""
    return not why_unknown_rows(layer) and not parametrize.is_parametrized(layer)


def closed_rows(layer: nn.Module, call: Call, step: Mapping[str, Tensor], max_rows: int) -> tuple[MeasuredRows, int]:
    r"""Measure some rows of a call of nn.Linear or nn.Conv1d/2d/3d, and say how many there are; `step` is Δθ/η.

    Every correction is linear in the output gradients, so row k adds :math:`g_k c_k^\top` to the gradient of
    the weight and :math:`b_k g_k` to that of the bias, and moves its own output by
    :math:`-\eta\, (c_k \cdot x_k + b_k)\, g_k`; the whole step moves it by :math:`\Delta W x_k + \Delta b`.
    """
    dtype = torch.promote_types(layer.get_parameter("weight").dtype, torch.float32)
    (input,), grad_output = call
    rows = rows_of(layer, input.to(dtype), grad_output.to(dtype), "weight" in step, "bias" in step)
    layout = Layout.of(layer)
    groups = layout.groups
    index = evenly(rows.count, max_rows // groups, input.device)
    measured = rows.at(index)
    x, grad = to_float64(measured.rows), to_float64(measured.grad_rows)
    found = _contributions(layer._correction if isinstance(layer, Corrected) else None, rows, measured, index)
    gains, moved = {}, torch.zeros_like(grad)
    if "weight" in step:
        gains["weight"] = (to_float64(found["weight"]) * x).sum(-1)
        moved += x @ layout.stacked(step["weight"]).to(x.dtype).mT
    if "bias" in step:
        gains["bias"] = to_float64(found["bias"]).view(grad.shape[:-1])
        moved += layout.stacked(step["bias"]).to(x.dtype).mT
    parts = torch.stack([gains[name] for name in step], -1)
    rows_and_groups = MeasuredRows(
        which=index + rows.count * torch.arange(groups, device=index.device).unsqueeze(-1),
        grad=grad,
        moved=moved,
        own=-parts.sum(-1, keepdim=True) * grad,
        gains=parts,
        squared_norm=x.square().sum(-1),
    )
    return MeasuredRows(*(tensor.flatten(0, 1) for tensor in rows_and_groups)), rows.count * groups


def _contributions(
    correction: Correction | None, rows: LinearRows | ConvRows, measured: LinearRows, index: Tensor
) -> dict[str, Tensor]:
    """The c and b of the rows at `index`, of shapes (groups, n, features) and (groups, n), if trained."""
    x = measured.rows
    if correction is not None and type(correction).gradients is not Correction.gradients:
        return _by_unit_gradients(correction, rows, x, index)
    scales = measured.with_ones(x.new_ones(x.shape[:-1]))
    if correction is not None:
        # (1, rows) or (N, groups, *positions) → (groups, rows)
        every = correction.scales(rows.factors())
        scales = {name: scale.movedim(1, 0).reshape(len(x), -1)[:, index] for name, scale in every.items()}
    return {name: scale.unsqueeze(-1) * x if name == "weight" else scale for name, scale in scales.items()}


def _by_unit_gradients(
    correction: Correction, rows: LinearRows | ConvRows, x: Tensor, index: Tensor
) -> dict[str, Tensor]:
    """Ask any rule itself for each row's contribution: with G the identity, grad_W = Σ_k e_k c_kᵀ has them all."""
    found: dict[str, list[Tensor]] = {}
    groups = len(x)
    for part in index.split(max(1, UNIT_NUMBERS // (rows.count * groups))):
        unit = torch.zeros(rows.count, len(part), dtype=x.dtype, device=part.device)
        unit[part, torch.arange(len(part), device=part.device)] = 1
        for name, gradient in correction.gradients(rows.answered_by(unit.expand(groups, -1, -1))).items():
            found.setdefault(name, []).append(gradient.reshape(groups, len(part), -1))
    return {name: torch.cat(parts, 1) for name, parts in found.items()}
