"""Layers that read one tensor, as the projections of attention do, and then keep one covariance."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._linalg.shards import Group, add_up

if TYPE_CHECKING:
    from .covariance import InputCovariance


class Readers:
    """Which layer has counted a tensor; tensors are not kept for it."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[InputCovariance, weakref.ref[Tensor], int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_found": {}}

    def forget(self) -> None:
        """Let no tensor that has been counted so far be followed."""
        self._found.clear()

    def first(self, layer: "InputCovariance", input: Tensor) -> "InputCovariance":
        """The first layer that has counted this very tensor as this one would, if nothing has been written to it since.

        If there is none it is this one, from now on.
        """
        if input.is_inference():  # which has no version: whether it has been written to cannot be told
            return layer
        key = id(input), layer.kind
        found = self._found.get(key)
        if found is None or found[2] != input._version:
            # It goes with the tensor, before another one can have its place.
            reference = weakref.ref(input, lambda _: self._found.pop(key, None))
            self._found[key] = found = layer, reference, input._version
        return found[0]


def agree(layers: Sequence["InputCovariance"], group: Group) -> list[int]:
    """Let a layer follow another one on all processes or on none.

    It does where it has followed on every process that it has seen rows on, and the other one has seen no more rows.

    Returns:
        How many rows all processes have seen of each layer, 0 of those that follow.
    """
    numbers = {layer: place for place, layer in enumerate(layers, start=1)}
    found = []
    for layer in layers:
        rows = (layer.source or layer).pending_rows
        code = numbers[layer.source] if layer.source and rows else 0
        found.append([rows, bool(rows), code, code**2])
    sums = torch.tensor(found, device=layers[0].weight.device).view(len(layers), 4)
    add_up([sums], group)
    every = sums.tolist()
    counts = [count for count, *_ in every]
    for layer, (count, several, first, second) in zip(layers, every, strict=True):
        # Squares add up to their mean's where all are equal, and nowhere else.
        source = layers[first // several - 1] if first and several * second == first**2 else None
        if source is not None and every[numbers[source] - 1][:3:2] == [count, 0]:
            layer.source, counts[numbers[layer] - 1] = source, 0
        elif layer.source is not None:
            layer.go_alone()
    return counts
