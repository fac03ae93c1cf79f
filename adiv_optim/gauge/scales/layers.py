"""The layer gauge: the RZ scaling of every weight by itself, of sharded ones too."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..._linalg.shards import whole
from ..channels.graph import ChannelGraph, Factors
from .rz import rz_scaling


@torch.no_grad()
def layer_scales(graph: ChannelGraph, names: Iterable[str], parameters: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return D and E of weights that are matrices or kernels by `rz_scaling`, and raise as that does.

    Sharded weights are gathered, one at a time, so that all processes that hold a part call this together.
    """
    found = {}
    for name in names:
        weight, shape = whole(parameters[name].detach()), graph.parameters[name].shape
        # Scales of float16 weights may lie outside of float16's range.
        single = weight.to(torch.promote_types(weight.dtype, torch.float32))
        ones = (1,) * (weight.dim() - 2)
        rows, _, columns = rz_scaling(single.reshape(shape), kernel_dims=len(ones))
        d, e = rows.view(*rows.shape, 1, *ones), columns.view(*columns.shape[:-1], 1, -1, *ones)
        found[name] = Factors(shape, d, e)
    return found
