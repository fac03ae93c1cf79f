"""Sums over processes, so that all of them have one covariance, and find the same factors of it."""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from .._linalg.shards import Group, add_up
from .layer_inputs import LayerInputs


def add_up_rows(layers: Sequence[LayerInputs], group: Group) -> None:
    """Add up what is pending over processes, for all layers that any of them has seen, so that all take part."""
    counts = torch.tensor([layer.pending_rows for layer in layers], device=layers[0].weight.device)
    add_up([counts], group)
    blocks: list[Tensor] = []
    for layer, rows in zip(layers, counts.tolist(), strict=True):
        if rows:
            layer.pending_rows = rows
            sums = layer.covariance.no_sums() if layer.pending is None else layer.pending
            layer.pending = [tensor.clone() for tensor in sums]  # a call in a graph may have them still
            blocks += layer.pending
    add_up(blocks, group)


def agree(layers: Sequence[LayerInputs], group: Group) -> None:
    """Let all processes have the eigenvectors of the first.

    Others may differ by a sign, or by rounding that nearly equal eigenvalues make large, and the products with them of
    different processes could not be added up.
    """
    is_first = distributed.get_rank(group) == 0
    of_low_rank = [layer for layer in layers if layer.covariance.depends_on_memory]
    for layer in of_low_rank:  # made anew, not in place: stacks hold the old ones
        memory = [t.clone() if is_first else torch.zeros_like(t) for t in layer.covariance.memory]
        layer.covariance = layer.covariance.with_memory(memory, layer.covariance.rows)
    add_up([tensor for layer in of_low_rank for tensor in layer.covariance.memory], group)
