"""The log-scales met while a model is traced, and which of them turn out to be one and the same."""

from collections.abc import Iterable

import torch
from torch import Tensor

#: The channel whose log-scale is 0: model inputs, model outputs and whatever a non-homogeneous function touches.
PINNED = 0
#: Why that channel is pinned.
CONSTANT = "a constant"


def pinned(dims: int) -> Tensor:
    """Return the ids of a tensor that no scale touches."""
    return torch.full([1] * dims, PINNED)


class Channels:
    """A union-find over channels, vectorised: joining tensors of ids costs no loop over channels.

    A component is named by its least id. Work is done on the ids that are asked for alone, never on all there are:
    a network that computes its weights has a channel for each of their elements. Pinned components are not merged,
    so that each channel keeps the reason that it was pinned for.
    """

    def __init__(self) -> None:
        self.made: list[tuple[str, Tensor]] = []  # each layer's name and the ids that its output brought into being
        self.count = 1
        self._above = torch.zeros(1, dtype=torch.long)  # a channel on the way to its component's root, which is its own
        self._reason = torch.zeros(1, dtype=torch.long)  # of a root: an index into _reasons; -1 while free
        self._reasons = [CONSTANT]

    def fresh(self, name: str, shape: Iterable[int]) -> Tensor:
        """Return new free channels, as ids of the given shape."""
        start, shape = self.count, tuple(shape)
        self.count += torch.Size(shape).numel()
        if self.count > len(self._above):  # doubled, so that growth costs as much as the result
            spare = max(self.count, 2 * len(self._above)) - len(self._above)
            self._above = torch.cat([self._above, torch.empty(spare, dtype=torch.long)])
            self._reason = torch.cat([self._reason, torch.empty(spare, dtype=torch.long)])
        ids = torch.arange(start, self.count)
        self._above[start : self.count] = ids
        self._reason[start : self.count] = -1
        self.made.append((name, ids))
        return ids.view(shape)

    def find(self, ids: Tensor) -> Tensor:
        """Return the name of each channel's component; `PINNED` where it is pinned."""
        root = self._roots(ids)
        return root.masked_fill(self._reason[root] >= 0, PINNED)

    def _roots(self, ids: Tensor) -> Tensor:
        root = self._above[ids]
        while not torch.equal(above := self._above[root], root):
            root = above
            self._above[ids] = root
        return root

    def join(self, first: Tensor, second: Tensor, why: str) -> None:
        """Let two tensors of ids, broadcast against each other, be the same channels."""
        first, second = (ids.flatten() for ids in torch.broadcast_tensors(self.find(first), self.find(second)))
        differ = (first != second).nonzero()[:, 0]
        first, second = low, high = first[differ], second[differ]
        while len(low):
            low, high = torch.minimum(low, high), torch.maximum(low, high)
            self._above.scatter_reduce_(0, high, low, "amin")
            low, high = self._roots(low), self._roots(high)
            differ = (low != high).nonzero()[:, 0]
            low, high = low[differ], high[differ]
        joined = torch.cat([first, second])
        pinned = joined[(self._above[joined] == PINNED) & (joined != PINNED)]
        if len(pinned):
            self._above[pinned] = pinned
            self._reason[pinned] = len(self._reasons)
            self._reasons.append(why)

    def pin(self, ids: Tensor, why: str) -> None:
        """Fix log-scales at 0."""
        self.join(ids, torch.tensor(PINNED), why)

    def share(self, ids: Tensor, dims: Iterable[int], why: str) -> Tensor:
        """Let channels be one along some dimensions, and return them with size 1 there."""
        for dim in dims:
            if ids.shape[dim] > 1:
                first = ids.narrow(dim, 0, 1)
                self.join(ids, first, why)
                ids = first
        return ids

    def compress(self, ids: Tensor) -> Tensor:
        """Return components with size 1 along every dimension that they do not vary along."""
        for dim in range(ids.dim()):
            # A stride of 0 marks the work of `expand`, and saves comparing: the batch and the positions of an image.
            if ids.shape[dim] > 1 and ids.stride(dim) == 0:
                ids = ids.narrow(dim, 0, 1)
        ids = self.find(ids)
        for dim in range(ids.dim()):
            if ids.shape[dim] > 1 and bool((ids == (first := ids.narrow(dim, 0, 1))).all()):
                ids = first
        return ids

    def is_pinned(self, ids: Tensor) -> bool:
        """Whether none of the channels is free."""
        return not self.find(ids).any()

    def reasons(self, ids: Tensor) -> tuple[str, ...]:
        """Why channels are pinned, most frequent first; nothing of those that are free."""
        found = self._reason[self._roots(ids.flatten())]
        counts = found[found >= 0].bincount()
        values = counts.nonzero()[:, 0]
        counts = counts[values]
        return tuple(dict.fromkeys(self._reasons[int(value)] for value in values[counts.argsort(descending=True)]))
