"""The rows of a layer, one after the other, sharing no code with the library."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def rows(layer: Any, input: Tensor, grad_output: Tensor) -> Iterator[tuple[Tensor, Tensor, range]]:
    """(x_k, g_k, the output channels of g_k) for every row, patch by patch for convolutions."""
    if isinstance(layer, nn.Linear):
        features = range(layer.out_features)
        for row, grad_row in zip(
            input.reshape(-1, layer.in_features), grad_output.reshape(-1, layer.out_features), strict=True
        ):
            yield row, grad_row, features
        return
    dims = len(layer.kernel_size)
    if input.dim() == dims + 1:
        input, grad_output = input.unsqueeze(0), grad_output.unsqueeze(0)
    padded = pad(layer, input)
    wide, narrow = layer.out_channels // layer.groups, layer.in_channels // layer.groups
    for n, group in itertools.product(range(len(input)), range(layer.groups)):
        channels = range(group * wide, (group + 1) * wide)
        for position in itertools.product(*map(range, grad_output.shape[2:])):
            window = tuple(
                slice(at * step, at * step + gap * (size - 1) + 1, gap)
                for at, step, gap, size in zip(position, layer.stride, layer.dilation, layer.kernel_size, strict=True)
            )
            patch = padded[(n, slice(group * narrow, (group + 1) * narrow), *window)]
            yield patch, grad_output[(n, slice(channels.start, channels.stop), *position)], channels


def pad(layer: Any, input: Tensor) -> Tensor:
    """Pad the input of a convolution as the layer's padding and padding_mode say."""
    if layer.padding == "same":
        totals = [gap * (size - 1) for gap, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    elif layer.padding == "valid":
        sides = [(0, 0)] * len(layer.kernel_size)
    else:
        sides = [(size, size) for size in layer.padding]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(input, [side for pair in reversed(sides) for side in pair], mode=mode)
