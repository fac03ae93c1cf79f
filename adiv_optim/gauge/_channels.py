"""The log-scales met while a model is traced, and which of them turn out to be one and the same."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

#: The channel whose log-scale is 0: model inputs, model outputs and whatever a non-homogeneous function touches.
PINNED = 0


@dataclass(frozen=True)
class Group:
    """Channels that one layer's output brought into being: `size` ids from `start` on."""

    name: str
    start: int
    size: int


class Channels:
    """A union-find over channels, vectorised: joining tensors of ids costs no loop over channels.

    A component is named by its least id, so that whatever is joined with `PINNED` is pinned.
    """

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._root = torch.zeros(1, dtype=torch.long)
        self._reason = torch.zeros(1, dtype=torch.long)  # an index into _reasons; -1 while free
        self._reasons = ["a constant"]

    def fresh(self, name: str, shape: Iterable[int]) -> Tensor:
        """Return new free channels, as ids of the given shape."""
        start, shape = len(self._root), tuple(shape)
        ids = torch.arange(start, start + int(torch.Size(shape).numel()))
        self.groups.append(Group(name, start, len(ids)))
        self._root = torch.cat([self._root, ids])
        self._reason = torch.cat([self._reason, torch.full_like(ids, -1)])
        return ids.view(shape)

    def find(self, ids: Tensor) -> Tensor:
        """Return the name of each channel's component; `PINNED` where it is pinned."""
        return self._root[ids]

    def join(self, first: Tensor, second: Tensor, why: str) -> None:
        """Let two tensors of ids, broadcast against each other, be the same channels."""
        first, second = (self.find(ids) for ids in (first, second))
        pairs = torch.stack([ids.flatten() for ids in torch.broadcast_tensors(first, second)]).unique(dim=1)
        while not torch.equal(pairs[0], pairs[1]):
            low, high = pairs.amin(0), pairs.amax(0)
            self._root.scatter_reduce_(0, high, low, "amin")
            while not torch.equal(above := self._root[self._root], self._root):
                self._root = above
            pairs = self._root[pairs]
        new = (self._root == PINNED) & (self._reason < 0)
        if bool(new.any()):
            self._reason[new] = len(self._reasons)
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
            # A stride of 0 saves comparing what `expand` made: the batch and the positions of an image.
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

    def reasons(self, group: Group) -> tuple[str, ...]:
        """Why channels of a group are pinned, most frequent first."""
        found = self._reason[group.start : group.start + group.size]
        values, counts = found[found >= 0].unique(return_counts=True)
        return tuple(dict.fromkeys(self._reasons[int(value)] for value in values[counts.argsort(descending=True)]))
