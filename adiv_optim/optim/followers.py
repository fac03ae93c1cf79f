"""Layers that read one tensor, as the projections of attention do, and then keep one covariance."""

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._linalg.shards import Group, add_up
from ..attach.rows import reads_patches
from .counting import Traced
from .sums import InputSums


class Following(InputSums):
    """Sums over what a layer reads, or another layer's, as long as that one reads the same."""

    #: Shared by layers that may follow each other.
    readers: "Readers"

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
        #: The last call that has been counted, as `Readers` know it.
        self.mark: object = None
        #: Who has followed this layer, and for them its sums as they were before its last call, with their rows.
        self.followers: list[Following] = []
        self.before: tuple[list[Tensor] | None, int] = None, 0

    def drop(self) -> None:
        """Drop what zero_grad has dropped; who has followed does that for itself."""
        for layer in self._in_step():
            layer.part()
        super().drop()

    @property
    @abstractmethod
    def kind(self) -> tuple[Any, ...]:
        """A key, equal for layers that make the same sums of one input."""

    @property
    def seen(self) -> bool:
        """Whether anything has been counted since the last measurement."""
        return self.source is not None or super().seen

    def follows(self, input: Tensor | None, readers: Traced | None = None) -> bool:
        """Whether another layer has counted this very tensor, and all that this one has read before."""
        if input is None:
            for layer in [*self._in_step(), *[self] * (self.source is not None)]:
                layer.part()
            self.alone, self.mark = True, None
            return False
        known = readers or self.readers
        first = None if self.alone else known.last(self, input)
        if first is not None and self._may_follow(first):
            if self not in first.followers:
                first.followers.append(self)
            self.source, self.calls = first, first.calls
            return True
        if self.source is not None:
            self.part()
        self.followers = [layer for layer in self._in_step() if layer.calls == self.calls]
        if self.followers:  # they may not read this
            self.before = _copied(self.pending), self.pending_rows
        self.calls += 1
        self.mark = None if self.alone else known.note(self, input)
        return False

    def _in_step(self) -> list["Following"]:
        """Who follows, once those are parted that have missed a call."""
        followers = [layer for layer in self.followers if layer.source is self]
        for layer in followers:
            if layer.calls < self.calls:
                layer.part()
        return [layer for layer in followers if layer.source is self]

    def part(self) -> None:
        """Stop following, with sums of its own over what both have read."""
        source = self.source
        assert source is not None
        self.source = None
        if self.calls == source.calls:
            self.pending, self.pending_rows = _copied(source.pending), source.pending_rows
        else:
            pending, self.pending_rows = source.before
            self.pending = _copied(pending)

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

    def take(self, first: "Following") -> None:
        """Remember what the layer that was followed does."""
        self.total, self.rows = first.total and list(first.total), first.rows


def _copied(sums: list[Tensor] | None) -> list[Tensor] | None:
    return sums and [part.clone() for part in sums]


class Readers:
    """Which layer has counted a tensor; tensors are not kept for it."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Following, weakref.ref[Tensor], int, object]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_found": {}}

    def forget(self) -> None:
        """Let no tensor that has been counted so far be followed."""
        self._found.clear()

    def last(self, layer: Following, input: Tensor) -> Following | None:
        """The layer whose last call counted this very tensor as this one would, if nothing has been written to it."""
        if input.is_inference():  # which has no version: whether it has been written to cannot be told
            return None
        first, _, version, mark = self._found.get((id(input), layer.kind), (None, None, None, None))
        return first if first is not None and first.mark is mark and version == input._version else None

    def note(self, layer: Following, input: Tensor) -> object:
        """Remember that a layer has counted a tensor, and return what `Following.mark` is until the next one."""
        if input.is_inference():
            return None
        key, mark = (id(input), layer.kind), object()
        # The entry goes with the tensor, before another tensor can have its id.
        reference = weakref.ref(input, lambda _: self._found.pop(key, None))
        self._found[key] = layer, reference, input._version, mark
        return mark


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
        # n Σc² is (Σc)² only where all c are equal.
        source = layers[first // several - 1] if first and several * second == first**2 else None
        if source is not None and every[numbers[source] - 1][:3:2] == [count, 0]:
            layer.source, counts[numbers[layer] - 1] = source, 0
        elif layer.source is not None:
            layer.part()
            layer.alone = True
    return counts
