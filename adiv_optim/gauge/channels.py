"""The channels of a network that is being traced: which share a scale, which are pinned, and what moves by them."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .graph import Entry

#: The channel whose log-scale is 0: of the model's inputs and outputs, and of arguments of functions like tanh.
PINNED = 0


def pinned(dims: int) -> Tensor:
    """Return the ids of a tensor of so many dimensions that no scale touches."""
    return torch.full([1] * dims, PINNED)


class Channels:
    """A union-find over channels, vectorised: joining tensors of ids costs no loop over channels.

    The id of a component is the least of its channels'. An operation works on its arguments alone, never on all
    channels: a network that computes its weights has a channel for each of their elements. Pinned components are not
    merged, so that each channel keeps its reason.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, Entry] = {}  # how each moves, by ids of channels
        self.buffers: dict[str, Entry] = {}
        self.count = 1
        self._parent = torch.zeros(1, dtype=torch.long)  # of a root the root itself
        self._reason_number = torch.zeros(1, dtype=torch.long)  # of a root: an index into _reasons; -1 while free
        self._reasons = [""]

    def fresh(self, shape: Iterable[int]) -> Tensor:
        """Return new free channels, as ids of the given shape."""
        start, shape = self.count, tuple(shape)
        self.count += math.prod(shape)
        if self.count > len(self._parent):  # doubled, so that growth costs as much as the result
            spare = self._parent.new_empty(max(self.count - len(self._parent), len(self._parent)))
            self._parent, self._reason_number = (torch.cat([t, spare]) for t in (self._parent, self._reason_number))
        ids = torch.arange(start, self.count)
        self._parent[start : self.count] = ids
        self._reason_number[start : self.count] = -1
        return ids.view(shape)

    def find(self, ids: Tensor) -> Tensor:
        """Return the id of each channel's component; `PINNED` where it is pinned."""
        root = self._roots(ids)
        return root.masked_fill(self._reason_number[root] >= 0, PINNED)

    def _roots(self, ids: Tensor) -> Tensor:
        root = self._parent[ids]
        while not torch.equal(parent := self._parent[root], root):
            root = parent
            self._parent[ids] = root
        return root

    def join(self, first: Tensor, second: Tensor, why: str) -> None:
        """Join two tensors of channels, broadcast against each other; `why` is the reason if that pins them."""
        first, second = (ids.flatten() for ids in torch.broadcast_tensors(self.find(first), self.find(second)))
        roots = torch.cat([first, second])
        while len(differ := (first != second).nonzero()[:, 0]):
            low = torch.minimum(first[differ], second[differ])
            high = torch.maximum(first[differ], second[differ])
            self._parent.scatter_reduce_(0, high, low, "amin")
            first, second = self._roots(low), self._roots(high)
        # Components that were joined to the pinned channel become roots again, with the reason.
        newly_pinned = roots[(self._parent[roots] == PINNED) & (roots != PINNED)]
        if len(newly_pinned):
            self._parent[newly_pinned] = newly_pinned
            self._reason_number[newly_pinned] = len(self._reasons)
            self._reasons.append(why)

    def pin(self, ids: Tensor, why: str) -> None:
        """Fix log-scales at 0."""
        self.join(ids, torch.tensor(PINNED), why)

    def join_along(self, ids: Tensor, dims: Iterable[int], why: str) -> Tensor:
        """Join channels along some dimensions, and return them with size 1 there."""
        for dim in dims:
            if ids.shape[dim] > 1:
                first = ids.narrow(dim, 0, 1)
                self.join(ids, first, why)
                ids = first
        return ids

    def compress(self, ids: Tensor) -> Tensor:
        """Return the ids of components, with size 1 along every dimension that they do not vary along."""
        for dim in range(ids.dim()):
            # A stride of 0 marks the work of `expand`, and saves comparing: the batch and the positions of an image.
            if ids.shape[dim] > 1 and ids.stride(dim) == 0:
                ids = ids.narrow(dim, 0, 1)
        ids = self.find(ids)
        for dim in range(ids.dim()):
            if ids.shape[dim] > 1 and bool((ids == (first := ids.narrow(dim, 0, 1))).all()):
                ids = first
        return ids

    def reasons(self, ids: Tensor) -> tuple[str, ...]:
        """Return why channels are pinned, most frequent first; none for `PINNED` itself and for free ones."""
        numbers = self._reason_number[self._roots(ids.flatten())]
        counts = numbers[numbers > 0].bincount()
        most_frequent = counts.argsort(descending=True)[: int(counts.count_nonzero())]
        return tuple(dict.fromkeys(self._reasons[int(number)] for number in most_frequent))

    def record(self, entries: dict[str, Entry], name: str, use: Entry) -> None:
        """Record how one use of a parameter or buffer moves it; every other use must move it alike."""
        first = entries.setdefault(name, use)
        why = use.why[0] if use.why else f"every use of {name} must move it alike"
        if (first.shape, first.power) == (use.shape, use.power):
            for side, other_side in zip(first.sides, use.sides, strict=True):
                self.join(side, other_side, why)
        else:  # as one of a grouped convolution, or a mean that is a variance elsewhere
            for side in (*first.sides, *use.sides):
                self.pin(side, why)
