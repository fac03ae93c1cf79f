"""The rows of one call of a layer: their gradient, their own movement, and that of the whole step."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.modules.conv import _ConvNd

from .._linalg import host
from .._linalg.least_squares import Parts
from ..jacobian.modules import as_rows, batched, jvp, pure
from ..jacobian.recorder import Call

#: The rows' own contributions to a layer's gradient are there a few at a time: at most so many numbers.
CONTRIBUTION_NUMBERS = 2**22


class MeasuredRows(NamedTuple):
    """Some rows of a layer, one along the first dimension of every tensor; movements are per unit of learning rate."""

    which: Tensor  # the rows' numbers
    grad: Tensor  # g
    moved: Tensor  # J Δθ / η for the step as a whole
    own: Tensor  # the movement by the row's own contribution to the gradient
    gains: Tensor  # the parts of the own gain, one column for each parameter of the step
    squared_norm: Tensor  # |x|²


def evenly(total: int, wanted: int, device: torch.device) -> Tensor:
    """At most `wanted` indices below `total`, the same ones every time, evenly spaced from 0 on."""
    count = min(total, max(1, wanted))
    return torch.arange(count, device=device) * total // max(count, 1)


def to_float64(tensor: Tensor) -> Tensor:
    """In float64, so that |g|² of a small gradient does not underflow; Apple's devices have only float32."""
    return tensor.to(host.widest(tensor.device))


def general_rows(layer: nn.Module, call: Call, step: Mapping[str, Tensor], max_rows: int) -> tuple[MeasuredRows, int]:
    r"""Measure some rows of a layer that has no closed form, whose gradient is plain.

    .. math:: \mathrm{own}_k = -J_k J_k^\top g_k, \qquad \gamma_k = |J_k^\top g_k|^2 / |g_k|^2, \qquad
              \mathrm{moved}_k = J_k \Delta\theta / \eta

    with two passes backward and one forward per measured row under vmap; also say how many rows there are. The layer
    treats the samples of its inputs, their first dimension, separately; `step` holds Δθ/η by parameter.
    """
    inputs, grad_output = batched(layer, *call)
    trained, run = pure(layer)
    rows = as_rows(layer, grad_output)
    groups, count, features = rows.shape
    per_sample = count // len(grad_output)
    index = evenly(groups * count, max_rows, rows.device)
    # Rows of a group follow each other sample by sample, and groups follow each other; so do a sample's own rows.
    sample = index % count // per_sample
    place = index // count * per_sample + index % per_sample
    grad = to_float64(rows.flatten(0, 1)[index])
    length = grad.norm(dim=-1)
    direction = grad / length.unsqueeze(-1)

    def one_row(place: Tensor, direction: Tensor, *sample: Tensor) -> tuple[Parts, Tensor]:
        def output(trained: Parts) -> Tensor:
            rows = as_rows(layer, run(trained, *(tensor.unsqueeze(0) for tensor in sample)))
            return rows.flatten(0, 1).gather(0, place.expand(1, features)).squeeze(0)

        found, pull_back = vjp(output, trained)[:2]
        contribution = pull_back(direction.to(found.dtype))[0]
        gains = {name: part.square().sum() for name, part in contribution.items()}
        return gains, jvp(output, trained, contribution)

    at_once = max(1, CONTRIBUTION_NUMBERS // sum(p.numel() for p in trained.values()))
    per_row = vmap(one_row, randomness="different", chunk_size=at_once)
    gains, own = per_row(place, direction, *(tensor[sample] for tensor in inputs))
    present, back = sample.unique(return_inverse=True)
    part = tuple(tensor[present] for tensor in inputs)
    tangent = {name: step[name].to(p.dtype) for name, p in trained.items()}
    moved = jvp(lambda trained: as_rows(layer, run(trained, *part)), trained, tangent)
    measured = MeasuredRows(
        which=index,
        grad=grad,
        moved=to_float64(moved[index // count, back * per_sample + index % per_sample]),
        own=-length.unsqueeze(-1) * to_float64(own),
        gains=to_float64(torch.stack([gains[name] for name in step], -1)),
        squared_norm=_input_norms(layer, inputs, grad_output, sample, index),
    )
    return measured, groups * count


def _input_norms(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, sample: Tensor, index: Tensor) -> Tensor:
    # The last dimension of a convolution is no row's features, so that equal leading ones say nothing.
    by_row = not isinstance(layer, _ConvNd) and len(inputs) == 1 and inputs[0].dim() > 1
    if by_row and inputs[0].shape[:-1] == output.shape[:-1]:
        return to_float64(inputs[0]).square().sum(-1).flatten()[index]
    return torch.stack(
        [to_float64(tensor[sample]).flatten().view(len(sample), -1).square().sum(-1) for tensor in inputs]
    ).sum(0)
