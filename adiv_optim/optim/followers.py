"""Layers that read one tensor, as the projections of attention do, and then keep one covariance."""

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._linalg.shards import Group, add_up
from ..attach.rows import reads_patches
from .sums import InputSums


class Following(InputSums):
    """Sums over what a layer reads, or another layer's, as long as that one reads the same.

    Args:
        name: as for `InputSums`, and the next two.
        modules: layers.
        with_bias: whether the bias is treated with the weight.
        readers: shared by layers that may follow each other.
    """

    def __init__(self, name: str, modules: list[nn.Module], with_bias: bool, readers: "Readers") -> None:
        self.readers = readers
        super().__init__(name, modules, with_bias)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        #: Whether this layer follows none: its rows are its own, or it has once read something else.
        self.alone = self.cut is not None or any(reads_patches(module) for module in self.modules)

    def forget_pending(self) -> None:
        """Drop what forward passes have left since the last measurement."""
        super().forget_pending()
        #: Whose sums since then are this layer's too, and how many calls have been counted.
        self.source: Following | None = None
        self.calls = 0

    @property
    @abstractmethod
    def kind(self) -> tuple[Any, ...]:
        """What another layer has in common with this one if it makes the same of its input."""

    @property
    def seen(self) -> bool:
        """Whether anything has been counted since the last measurement."""
        return self.source is not None or super().seen

    def follows(self, input: Tensor) -> bool:
        """Whether another layer has counted this very tensor, and all that this one has read before."""
        first = self if self.alone else self.readers.first(self, input)
        if first is not self and self._may_follow(first):
            self.source, self.calls = first, first.calls
            return True
        if self.source is not None:  # whose sums may hold more by now than this layer has read
            self.forget_pending()
        self.calls += 1
        return False

    def _may_follow(self, first: "Following") -> bool:
        if first.calls != self.calls + 1 or (self.calls and self.source is not first):
            return False
        self.alone = not self._same_past(first)
        return not self.alone

    def memory(self) -> list[Tensor]:
        """All tensors that are kept from step to step."""
        return self.total or []

    def _same_past(self, first: "Following") -> bool:
        if self.total is None or first.total is None:
            return self.total is first.total
        # Those that were loaded from a checkpoint may be equal and not the same.
        pairs = zip(self.memory(), first.memory(), strict=True)
        return self.rows == first.rows and all(one is two or torch.equal(one, two) for one, two in pairs)

    def go_alone(self) -> None:
        """Stop following, with the same sums."""
        source, self.alone = self.source, True
        assert source is not None
        self.source, self.pending_rows = None, source.pending_rows
        self.pending = source.pending and list(source.pending)

    def take(self, first: "Following") -> None:
        """Remember what the layer that was followed does."""
        self.total, self.rows = first.total and list(first.total), first.rows


class Readers:
    """Which layer has counted a tensor; tensors are not kept for it."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Following, weakref.ref[Tensor], int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_found": {}}

    def forget(self) -> None:
        """Let no tensor that has been counted so far be followed."""
        self._found.clear()

    def first(self, layer: Following, input: Tensor) -> Following:
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


def agree(layers: Sequence[Following], group: Group) -> list[int]:
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
