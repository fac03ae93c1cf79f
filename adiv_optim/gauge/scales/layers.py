"""The layer gauge: the RZ scaling of every weight by itself, of sharded ones too."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..._linalg.shards import cut_of, whole
from ..channels.graph import ChannelGraph, Entry, Factors
from .network import sums_by_channel, sums_of
from .rz import rz_scaling, within


@torch.no_grad()
def layer_scales(graph: ChannelGraph, names: Iterable[str], parameters: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return D and E of weights that are matrices or kernels by `rz_scaling`, and raise as that does.

    Of a sharded weight every process sums log|W| over the rows and the columns of what it holds; one sum over processes
    for all weights then gives D and E on each. A weight for which that is not enough, as one with zeros, is gathered.
    """
    found, weights = {}, {name: parameters[name].detach() for name in names}
    sharded = {name: weight for name, weight in weights.items() if cut_of(weight) is not None}
    if sharded:
        found = _by_sums(graph, sharded)
    for name, weight in weights.items():
        if name not in found:
            shape = graph.parameters[name].shape
            # Scales of float16 weights may lie outside of float16's range.
            single = whole(weight).to(torch.promote_types(weight.dtype, torch.float32))
            ones = (1,) * (weight.dim() - 2)
            rows, _, columns = rz_scaling(single.reshape(shape), kernel_dims=len(ones))
            d, e = rows.view(*rows.shape, 1, *ones), columns.view(*columns.shape[:-1], 1, -1, *ones)
            found[name] = Factors(shape, d, e)
    return found


def _by_sums(graph: ChannelGraph, weights: Mapping[str, Tensor]) -> dict[str, Factors]:
    """The scales of those weights for which the sums over rows and columns are enough."""
    numbered, channels = {}, 0
    for name, weight in weights.items():
        shape, ones, device = graph.parameters[name].shape, [1] * (weight.dim() - 2), weight.device
        *stack, out, inputs = shape[: len(shape) - len(ones)]
        rows = channels + torch.arange(math.prod(stack) * out, device=device).view(*stack, out, 1, *ones)
        channels += rows.numel()
        columns = channels + torch.arange(math.prod(stack) * inputs, device=device).view(*stack, 1, inputs, *ones)
        channels += columns.numel()
        numbered[name] = Entry(shape, rows, columns, counted=True)
    parts = {name: entry.held(name, weights[name]) for name, entry in numbered.items()}
    nothing = torch.zeros(channels, dtype=torch.float64, device=next(iter(weights.values())).device)
    sums = {name: (part, sums_of(weight, part, nothing, 0.0, False)) for name, (part, weight) in parts.items()}
    totals, found = sums_by_channel(sums, weights, channels, nothing.device), {}
    for name, entry in numbered.items():
        size = math.prod(entry.shape)
        rows, columns = (totals[ids] * (ids.numel() / size) for ids in (entry.plus, entry.minus))
        half = rows.mean(len(entry.shape) - weights[name].dim(), keepdim=True) / 2
        logs = rows - half, -columns - half  # sums over columns come with the sign that they enter the equations with
        dtype = torch.promote_types(weights[name].dtype, torch.float32)
        if within(-math.log(torch.finfo(dtype).tiny), *logs):
            found[name] = Factors(entry.shape, *(part.exp().to(dtype.to_real()) for part in logs))
    return found
