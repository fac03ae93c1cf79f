"""The normal equations of the network gauge, a weighted graph Laplacian over channels, and their solution."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..._linalg.conjugate_gradients import conjugate_gradients
from ..channels.graph import Entry

#: Up to this many sets the equations are solved directly, by a dense matrix between sets; beyond, by iterations.
DIRECT = 512


@dataclass(frozen=True, eq=False)
class Laplacian:
    r"""N = diag(d) − BᵀMB − (edges), over the channels with the pinned one in place 0.

    A weight block without zeros joins every output to every input with the same strength κ, the size of its
    kernel. It acts on a vector through two sums alone, over the *set* of its outputs and that of its inputs:
    :math:`(Ns)_o = d_o s_o - \kappa \sum_i s_i`. B sums over sets, M swaps the two of a block and multiplies
    by κ. A grouped convolution has a block per group, a per-channel gain one per channel.

    Args:
        degree: d, how many weights touch each channel; (free + 1,).
        gather: the channel of every row and column sum that `right` gets.
        member: the channels of all sets, one set after another.
        owner: the set of each.
        partner: the other set of a set's block.
        strength: κ of each set's block.
        edges: (two channels each, strength each), what differs from full blocks where weights are zero.
        entry_sets: for each entry, which sets are its.
    """

    degree: Tensor
    gather: Tensor
    member: Tensor
    owner: Tensor
    partner: Tensor
    strength: Tensor
    edges: tuple[Tensor, Tensor] | None
    entry_sets: tuple[slice, ...]
    _cache: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, free: int, entries: tuple[Entry, ...], device: torch.device) -> "Laplacian":
        """Build the equations of weights without zeros."""
        degree = torch.zeros(free + 1, dtype=torch.float64)
        members, owners, strengths, slices, count = [], [], [], [], 0
        for entry in entries:
            elements = torch.Size(entry.shape).numel()
            for index in (entry.plus, entry.minus):
                share = torch.full((index.numel(),), elements / index.numel(), dtype=torch.float64)
                degree.index_add_(0, index.flatten(), share)
            before = count
            if bool(entry.plus.any()) and bool(entry.minus.any()):
                plus, minus = (_by_block(index, entry) for index in (entry.plus, entry.minus))
                blocks = len(plus)
                kernel = elements / (blocks * plus.shape[1] * minus.shape[1])
                for place, sets in enumerate((plus, minus)):
                    members.append(sets.flatten())
                    owners.append((count + place + 2 * torch.arange(blocks)).repeat_interleave(sets.shape[1]))
                strengths.append(torch.full((2 * blocks,), kernel, dtype=torch.float64))
                count += 2 * blocks
            slices.append(slice(before, count))
        nothing = torch.zeros(0, dtype=torch.long)
        return cls(
            degree=degree.to(device),
            gather=torch.cat([index.flatten() for e in entries for index in (e.plus, e.minus)]).to(device),
            member=torch.cat([nothing, *members]).to(device),
            owner=torch.cat([nothing, *owners]).to(device),
            partner=(torch.arange(count) ^ 1).to(device),
            strength=torch.cat([torch.zeros(0, dtype=torch.float64), *strengths]).to(device),
            edges=None,
            entry_sets=tuple(slices),
        )

    def right(self, sums: list[Tensor]) -> Tensor:
        """Add the row and column sums of log|W| up by channel."""
        return torch.zeros_like(self.degree).index_add_(0, self.gather, torch.cat(sums).to(self.degree.dtype))

    def without(self, entries: tuple[Entry, ...], zeros: list[Tensor]) -> "Laplacian":
        """Return the equations with the weights that are zero left out."""
        lost, ends, amounts, strength = [], [], [], self.strength.clone()
        for entry, zero, sets in zip(entries, zeros, self.entry_sets, strict=True):
            dims = range(zero.dim())
            plus, minus = entry.plus, entry.minus
            kernel = [dim for dim in dims if plus.shape[dim] == 1 and minus.shape[dim] == 1]
            count = zero.sum(kernel, keepdim=True) if kernel else zero.long()
            for index in (plus, minus):
                across = [dim for dim in dims if index.shape[dim] == 1]
                lost.append((count.sum(across) if across else count).flatten())
            total = int(count.sum())
            if not total or sets.start == sets.stop:
                continue
            if dense := 2 * total < zero.numel():
                what = -count
            else:
                what, strength[sets] = zero.numel() // count.numel() - count, 0.0
            if dense or total < zero.numel():
                at = what.nonzero(as_tuple=True)
                ends.append(torch.stack([index.expand(what.shape)[at] for index in (plus, minus)]))
                amounts.append(what[at])
        degree = self.degree.index_add(0, self.gather, -torch.cat(lost).to(self.degree.dtype))
        edges = (torch.cat(ends, 1), torch.cat(amounts).to(degree.dtype)) if ends else None
        return replace(self, degree=degree, strength=strength, edges=edges, _cache={})

    def times(self, scales: Tensor) -> Tensor:
        """N s, with 0 in the pinned place."""
        sums = torch.zeros_like(self.strength).index_add_(0, self.owner, scales[self.member])
        out = self.degree * scales
        out.index_add_(0, self.member, (self.strength * sums[self.partner])[self.owner], alpha=-1)
        if self.edges is not None:
            (first, second), amount = self.edges
            out.index_add_(0, first, amount * scales[second], alpha=-1)
            out.index_add_(0, second, amount * scales[first], alpha=-1)
        out[0] = 0
        return out

    def solve(self, right: Tensor) -> Tensor:
        """Return s with N s = right, to rounding; 0 in the pinned place and for channels without weights."""
        right = right.clone()
        right[0] = 0
        if self.edges is None and len(self.strength) <= DIRECT:
            scales = self._direct(right)
            # Twice is enough to bring a backward stable solution to rounding, and asks the device nothing.
            for _ in range(2):
                scales = scales + self._direct(right - self.times(scales))
            misfit, size = (right - self.times(scales)).abs().max(), (self.degree * scales.abs()).max()
            if bool(misfit <= 1e-12 * (size + right.abs().max())):
                return scales
        return self._iterated(right)

    @property
    def _inverse_degree(self) -> Tensor:
        inverse = torch.where(self.degree > 0, 1 / self.degree, 0.0)
        inverse[0] = 0
        return inverse

    def _direct(self, right: Tensor) -> Tensor:
        """With z = Bs: (I − B D⁻¹ Bᵀ M) z = B D⁻¹ right, and s = D⁻¹(right + BᵀMz)."""
        if not self._cache:
            inverse, sets = self._inverse_degree, len(self.strength)
            incidence = self.degree.new_zeros(sets, len(self.degree))
            incidence.index_put_((self.owner, self.member), self.degree.new_ones(()), accumulate=True)
            shared = (incidence * inverse) @ incidence.T
            system = torch.eye(sets, dtype=shared.dtype, device=shared.device) - shared[:, self.partner] * self.strength
            self._cache["lu"] = torch.linalg.lu_factor_ex(system)[:2]
            self._cache["inverse"] = inverse
        inverse = self._cache["inverse"]
        if not len(self.strength):
            return inverse * right
        sums = torch.zeros_like(self.strength).index_add_(0, self.owner, (inverse * right)[self.member])
        sums = torch.linalg.lu_solve(*self._cache["lu"], sums[:, None])[:, 0]
        pulled = (self.strength * sums[self.partner])[self.owner]
        return inverse * right.index_add(0, self.member, pulled)

    def _iterated(self, right: Tensor, rounds: int = 4, most: int = 2000) -> Tensor:
        """Conjugate gradients on D^{-1/2} N D^{-1/2}, restarted from the true residual until that stops falling."""
        root = self._inverse_degree.sqrt()
        scales, least = torch.zeros_like(right), torch.full_like(right[0], torch.inf)
        for _ in range(rounds):
            residual = root * (right - self.times(scales))
            length = residual.norm()
            if not bool(length < 0.5 * least):
                break
            least = length
            # Each round need only gain what it can before rounding parts its residual from the true one.
            change, _ = conjugate_gradients(lambda y: root * self.times(root * y), residual, 1e-14 * length, most)
            scales = scales + root * change
        return scales


def _by_block(index: Tensor, entry: Entry) -> Tensor:
    """(blocks, members): dimensions along which both sides vary count blocks, the rest members."""
    dims = range(index.dim())
    both = [dim for dim in dims if entry.plus.shape[dim] > 1 and entry.minus.shape[dim] > 1]
    blocks = torch.Size([index.shape[dim] for dim in both]).numel()
    return index.permute(*both, *[dim for dim in dims if dim not in both]).reshape(blocks, -1)
