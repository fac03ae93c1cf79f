"""The rows of one call of a layer: their gradients, and how each moves by its part of the step, and by the step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from .._device import wide_dtype, widest
from ..corrections import Correction
from ..functional.conv_rows import ConvRows
from ..functional.linears import LinearRows
from ..functional.patches import as_matrices, patches_of, row_matrix
from ..jacobian.modules import Parameters, as_rows, batched, jvp, pure
from ..jacobian.recording import Call
from ..rows.layers import Corrected, Layout, why_unknown_rows

#: The contributions of single rows to a layer's gradient that are in memory at once hold at most so many numbers.
CONTRIBUTION_NUMBERS = 2**22
#: Unit output gradients that go through a rule at once hold at most so many numbers.
UNIT_NUMBERS = 2**22


class MeasuredRows(NamedTuple):
    """Some rows of a layer, one along the first dimension of every tensor; movements are per unit of learning rate."""

    row_index: Tensor  # which of all rows it is
    grad: Tensor  # g
    movement: Tensor  # J Δθ / η for the step as a whole
    own_movement: Tensor  # the movement by the row's own contribution to the gradient
    own_gains: Tensor  # the parts of the own gain, one column for each parameter of the step
    squared_norm: Tensor  # |x|²


def evenly(total: int, wanted: int, device: torch.device) -> Tensor:
    """Return at most `wanted` indices below `total`, evenly spaced from 0 on, the same every time."""
    count = min(total, max(1, wanted))
    return torch.arange(count, device=device) * total // count


def general_rows(layer: nn.Module, call: Call, step: Mapping[str, Tensor], max_rows: int) -> tuple[MeasuredRows, int]:
    r"""Measure some rows of a layer without a closed form, and count all; its gradient is plain.

    .. math:: o_k = -J_k J_k^\top g_k, \qquad \gamma_k = |J_k^\top g_k|^2 / |g_k|^2, \qquad
              \Delta z_k / \eta = J_k \Delta\theta / \eta

    with two passes forward and three backward per measured row under vmap. The layer treats the samples of its inputs,
    their first dimension, separately; `step` holds Δθ/η by parameter.
    """
    inputs, grad_output = batched(layer, call.inputs, call.grad_output)
    trained, run = pure(layer)
    rows = as_rows(layer, grad_output)
    groups, count, features = rows.shape
    per_sample = count // len(grad_output)
    index = evenly(groups * count, max_rows, rows.device)
    # Groups follow each other, in a group the samples, and in a sample the positions.
    group, row = index // count, index % count
    sample, position = row // per_sample, row % per_sample
    place = group * per_sample + position  # among the rows of its sample
    grad = widest(rows.flatten(0, 1)[index])  # |g|² of a small gradient would underflow
    length = grad.norm(dim=-1)
    direction = grad / length.unsqueeze(-1)

    def own_part(place: Tensor, direction: Tensor, *inputs: Tensor) -> tuple[Parameters, Tensor]:
        """Return |Jᵀu|² by parameter, and JJᵀu, for a direction u of one row."""

        def output(trained: Parameters) -> Tensor:
            rows = as_rows(layer, run(trained, *(tensor.unsqueeze(0) for tensor in inputs)))
            return rows.flatten(0, 1).gather(0, place.expand(1, features)).squeeze(0)

        value, pull_back = vjp(output, trained)[:2]
        contribution = pull_back(direction.to(value.dtype))[0]
        gains = {name: part.square().sum() for name, part in contribution.items()}
        return gains, jvp(output, trained, contribution)

    # Every row takes its sample along.
    of_sample = sum(tensor.numel() for tensor in (*inputs, grad_output)) // len(grad_output)
    at_once = max(1, CONTRIBUTION_NUMBERS // max(of_sample, sum(p.numel() for p in trained.values())))
    per_row = vmap(own_part, randomness="different", chunk_size=at_once)
    gains, own_movement = per_row(place, direction, *(tensor[sample] for tensor in inputs))
    measured_samples, which = sample.unique(return_inverse=True)
    their_inputs = tuple(tensor[measured_samples] for tensor in inputs)
    tangent = {name: step[name].to(p.dtype) for name, p in trained.items()}
    movement = jvp(lambda trained: as_rows(layer, run(trained, *their_inputs)), trained, tangent)
    measured = MeasuredRows(
        row_index=index,
        grad=grad,
        movement=widest(movement[group, which * per_sample + position]),
        # A row without a gradient has no direction, and does not move itself.
        own_movement=(-length.unsqueeze(-1) * widest(own_movement)).masked_fill(length.unsqueeze(-1) == 0, 0.0),
        own_gains=widest(torch.stack([gains[name] for name in step], -1)),
        squared_norm=_input_norms(layer, inputs, grad_output, sample, index),
    )
    return measured, groups * count


def _input_norms(
    layer: nn.Module, inputs: tuple[Tensor, ...], grad_output: Tensor, sample: Tensor, index: Tensor
) -> Tensor:
    # A convolution's last dimension is a position, so equal leading dimensions prove nothing.
    by_row = not isinstance(layer, _ConvNd) and len(inputs) == 1 and inputs[0].dim() > 1
    if by_row and inputs[0].shape[:-1] == grad_output.shape[:-1]:
        return widest(inputs[0]).square().sum(-1).flatten()[index]
    by_input = [widest(tensor[sample]).reshape(len(sample), -1).square().sum(-1) for tensor in inputs]
    return torch.stack(by_input).sum(0)


def has_closed_form(layer: nn.Module) -> bool:
    """Whether the layer is torch's own linear map or convolution, corrected or not."""
    return not why_unknown_rows(layer) and not parametrize.is_parametrized(layer)


def closed_rows(layer: nn.Module, call: Call, step: Mapping[str, Tensor], max_rows: int) -> tuple[MeasuredRows, int]:
    r"""Measure some rows of a call of nn.Linear or nn.Conv1d/2d/3d, and count all; `step` is Δθ/η.

    Every correction is linear in the output gradients, so row k adds :math:`g_k c_k^\top` to the gradient of
    the weight and :math:`b_k g_k` to that of the bias, and moves its own output by
    :math:`-\eta\, (c_k \cdot x_k + b_k)\, g_k`; the whole step moves it by :math:`\Delta W x_k + \Delta b`.
    """
    dtype = wide_dtype(layer.get_parameter("weight"))
    (input,), grad_output = call.read, call.grad_output
    rows = _rows_of(layer, input.to(dtype), grad_output.to(dtype), "weight" in step, "bias" in step)
    layout = Layout.of(layer)
    groups = layout.groups
    index = evenly(rows.count, max_rows // groups, input.device)
    measured = _rows_at(rows, index)
    x, grad = widest(measured.rows), widest(measured.grad_rows)
    contributions = _contributions(layer._correction if isinstance(layer, Corrected) else None, rows, measured, index)
    gains, movement = {}, torch.zeros_like(grad)
    if "weight" in step:
        gains["weight"] = (widest(contributions["weight"]) * x).sum(-1)
        movement += x @ as_matrices(step["weight"], *layout).to(x.dtype).mT
    if "bias" in step:
        gains["bias"] = widest(contributions["bias"]).view(grad.shape[:-1])
        movement += as_matrices(step["bias"], *layout).to(x.dtype).mT
    own_gains = torch.stack([gains[name] for name in step], -1)
    by_group = MeasuredRows(
        row_index=index + rows.count * torch.arange(groups, device=index.device).unsqueeze(-1),
        grad=grad,
        movement=movement,
        own_movement=-own_gains.sum(-1, keepdim=True) * grad,
        own_gains=own_gains,
        squared_norm=x.square().sum(-1),
    )
    return MeasuredRows(*(tensor.flatten(0, 1) for tensor in by_group)), rows.count * groups


def _rows_of(
    layer: nn.Module, input: Tensor, grad_output: Tensor, needs_weight: bool, needs_bias: bool
) -> LinearRows | ConvRows:
    """Return the rows of a call and their output gradients as a correction takes them, in a stack of groups."""
    patches = patches_of(layer, input)
    if not patches.kernel:
        rows, grad_rows = patches.input.unsqueeze(0), row_matrix(grad_output).unsqueeze(0)
        return LinearRows(rows, grad_rows, needs_weight, needs_bias)
    grad_output = grad_output.reshape(len(patches.input), *grad_output.shape[-len(patches.kernel) - 1 :])
    return ConvRows(patches, grad_output, layer.get_parameter("weight").detach(), needs_weight, needs_bias)


def _rows_at(rows: LinearRows | ConvRows, index: Tensor) -> LinearRows:
    """Return, of every group, the rows whose numbers are in `index`, ascending."""
    if isinstance(rows, LinearRows):
        return replace(rows, rows=rows.rows[..., index, :], grad_rows=rows.grad_rows[..., index, :])
    chosen, before = [], 0
    for part in (part.unfold() for part in rows.patches.slices(rows.patches.input.dtype)):
        is_here = (index >= before) & (index < before + part.shape[1])
        chosen.append(part[:, index[is_here] - before])
        before += part.shape[1]
    return LinearRows(torch.cat(chosen, 1), rows.grad_rows[:, index], rows.needs_weight, rows.needs_bias)


def _with_grad_rows(rows: LinearRows | ConvRows, grad_rows: Tensor) -> LinearRows | ConvRows:
    """Return the same rows with other output gradients, (groups, rows, channels), of any number of channels."""
    if isinstance(rows, LinearRows):
        return replace(rows, grad_rows=grad_rows)
    samples, _, *positions = rows.grad_output.shape
    groups, _, channels = grad_rows.shape
    grad_output = grad_rows.reshape(groups, samples, *positions, channels)
    grad_output = grad_output.movedim(0, 1).movedim(-1, 2).reshape(samples, groups * channels, *positions)
    weight = rows.weight.new_empty(grad_output.shape[1], *rows.weight.shape[1:])
    return replace(rows, grad_output=grad_output, weight=weight)


def _contributions(
    correction: Correction | None, rows: LinearRows | ConvRows, measured: LinearRows, index: Tensor
) -> dict[str, Tensor]:
    """Return c and b of the rows at `index`, (groups, n, features) and (groups, n), where trained."""
    x = measured.rows
    if correction is not None and type(correction).gradients is not Correction.gradients:
        return _by_unit_gradients(correction, rows, x, index)
    scales = measured.with_ones(x.new_ones(x.shape[:-1]))
    if correction is not None:
        of_all_rows = correction.scales(rows.factors())
        # (1, rows) or (N, groups, *positions) → (groups, rows)
        scales = {name: scale.movedim(1, 0).reshape(len(x), -1)[:, index] for name, scale in of_all_rows.items()}
    return {name: scale.unsqueeze(-1) * x if name == "weight" else scale for name, scale in scales.items()}


def _by_unit_gradients(
    correction: Correction, rows: LinearRows | ConvRows, x: Tensor, index: Tensor
) -> dict[str, Tensor]:
    """Read each row's contribution off the rule itself: with G the identity, grad_W = Σ_k e_k c_kᵀ has them all."""
    contributions: dict[str, list[Tensor]] = {}
    groups = len(x)
    for part in index.split(max(1, UNIT_NUMBERS // (rows.count * groups))):
        unit = torch.zeros(rows.count, len(part), dtype=x.dtype, device=part.device)
        unit[part, torch.arange(len(part), device=part.device)] = 1
        for name, gradient in correction.gradients(_with_grad_rows(rows, unit.expand(groups, -1, -1))).items():
            contributions.setdefault(name, []).append(gradient.reshape(groups, len(part), -1))
    return {name: torch.cat(parts, 1) for name, parts in contributions.items()}
