"""The normal equations of the network gauge, a weighted graph Laplacian over channels, and their solution."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..._linalg.conjugate_gradients import conjugate_gradients
from ..channels.graph import Entry


@dataclass(frozen=True, eq=False)
class Laplacian:
    r"""N = diag(d) − BᵀMB − (edges), over the channels with the pinned one in place 0.

    A weight block without zeros joins every output to every input with the same strength κ, the size of its
    kernel. It acts on a vector through two sums alone, over the *set* of its outputs and that of its inputs:
    :math:`(Ns)_o = d_o s_o - \kappa \sum_i s_i`. B sums over sets, M swaps the two of a block and multiplies
    by κ. A grouped convolution has a block per group, a per-channel gain one per channel.
    """

    degree: Tensor  # d, how many weights touch each channel; (free + 1,)
    gather: Tensor  # the channel of every row and column sum, entry by entry
    member: Tensor  # the channels of all sets, one set after another
    owner: Tensor  # the set of each; sets 2k and 2k + 1 are the two of a block
    strength: Tensor  # κ of each set's block
    entry_sets: tuple[slice, ...]  # for each entry, which sets are its
    edges: tuple[Tensor, Tensor] | None = None  # (two channels each, strength each): where zeros spoil a full block

    @classmethod
    def of(cls, free: int, entries: tuple[Entry, ...], device: torch.device) -> "Laplacian":
        """Build the equations of weights without zeros."""
        gather, shares, members, owners, strengths, slices, count = [], [], [], [], [], [], 0
        # On the CPU, as indices are, whatever the default device is. By no context: Ctrl-C may leave one half entered.
        for entry in entries:
            elements, before = torch.Size(entry.shape).numel(), count
            for index in (entry.plus, entry.minus):
                gather.append(index.flatten())
                shares.append(torch.full((index.numel(),), elements / index.numel(), dtype=torch.float64, device="cpu"))
            if bool(entry.plus.any()) and bool(entry.minus.any()):
                plus, minus = (_by_block(index, entry) for index in (entry.plus, entry.minus))
                count += 2 * len(plus)
                for place, sets in enumerate((plus, minus)):
                    members.append(sets.flatten())
                    owners.append(torch.arange(before + place, count, 2, device="cpu").repeat_interleave(sets.shape[1]))
                kernel = elements / (len(plus) * plus.shape[1] * minus.shape[1])
                strengths.append(torch.full((count - before,), kernel, dtype=torch.float64, device="cpu"))
            slices.append(slice(before, count))
        nothing = torch.zeros(0, dtype=torch.long, device="cpu")
        channels = torch.cat(gather)
        return cls(
            degree=torch.zeros(free + 1, dtype=torch.float64, device="cpu")
            .index_add_(0, channels, torch.cat(shares))
            .to(device),
            gather=channels.to(device),
            member=torch.cat([nothing, *members]).to(device),
            owner=torch.cat([nothing, *owners]).to(device),
            strength=torch.cat([nothing.double(), *strengths]).to(device),
            entry_sets=tuple(slices),
        )

    def without(self, entries: tuple[Entry, ...], zeros: Iterable[Tensor]) -> "Laplacian":
        """Return the equations with the weights that are zero left out: edges take them away from the full blocks."""
        lost, ends, amounts, device = [], [], [], self.degree.device
        for entry, zero, sets in zip(entries, zeros, self.entry_sets, strict=True):
            count = zero.long().sum_to_size(torch.broadcast_shapes(entry.plus.shape, entry.minus.shape))
            sides = (entry.plus, entry.minus)
            lost += [count.sum_to_size(index.shape).flatten().to(device) for index in sides]
            if sets.start < sets.stop and count.any():
                at = count.nonzero(as_tuple=True)
                ends.append(torch.stack([index.expand(count.shape)[at] for index in sides]).to(device))
                amounts.append(-count[at].to(device))
        degree = self.degree.index_add(0, self.gather, -torch.cat(lost).to(self.degree.dtype))
        edges = (torch.cat(ends, 1), torch.cat(amounts).to(degree.dtype)) if ends else None
        return replace(self, degree=degree, edges=edges)

    def times(self, scales: Tensor) -> Tensor:
        """N s, with 0 in the pinned place."""
        sums = torch.zeros_like(self.strength).index_add_(0, self.owner, scales[self.member])  # B s
        across = (self.strength * sums.view(-1, 2).flip(1).flatten())[self.owner]  # M of it, for each member
        out = (self.degree * scales).index_add_(0, self.member, across, alpha=-1)
        if self.edges is not None:
            (first, second), amount = self.edges
            out.index_add_(0, first, amount * scales[second], alpha=-1)
            out.index_add_(0, second, amount * scales[first], alpha=-1)
        out[0] = 0
        return out

    def solve(self, right: Tensor) -> Tensor:
        """Return s with N s = right; like `right` it is 0 in the pinned place, and for channels without weights.

        By conjugate gradients on :math:`D^{-1/2} N D^{-1/2}`, in as many steps as there are sets at most but for
        rounding and zeros.
        """
        root = torch.where(self.degree > 0, self.degree.rsqrt(), 0.0)
        goal = torch.finfo(right.dtype).eps * (root * right).norm()
        return root * conjugate_gradients(lambda y: root * self.times(root * y), root * right, goal)


def _by_block(index: Tensor, entry: Entry) -> Tensor:
    """(blocks, members): dimensions along which both sides vary count blocks, the rest members."""
    dims = range(index.dim())
    both = [dim for dim in dims if entry.plus.shape[dim] > 1 and entry.minus.shape[dim] > 1]
    blocks = torch.Size([index.shape[dim] for dim in both]).numel()
    return index.permute([*both, *(dim for dim in dims if dim not in both)]).reshape(blocks, -1)
