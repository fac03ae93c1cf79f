"""Least squares over logarithms: of a matrix with zeros, and of the channels of a network, by conjugate gradients."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import _device
from .graph import Entry

#: Iterations between two looks at whether all problems are solved, each of which waits for the device.
_BETWEEN_LOOKS = 4


@dataclass(frozen=True, eq=False)
class Laplacian:
    r"""The normal equations of the network gauge, N = diag(d) − BᵀMB − (edges), with the pinned channel in place 0.

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
    entry_sets: tuple[slice, ...]  # the sets of each entry
    edges: tuple[Tensor, Tensor] | None = None  # (two channels each, strength each): where a block has zeros

    @classmethod
    def of(cls, free: int, entries: tuple[Entry, ...], device: torch.device) -> "Laplacian":
        """Build the equations of weights without zeros."""
        gather, shares, members, owners, strengths, slices, count = [], [], [], [], [], [], 0
        # On the CPU, as indices are, under any default device. By no context: Ctrl-C may leave one half entered.
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
        """Return the equations without the weights that are zero: edges take them away from the full blocks."""
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
        """Return N s, with 0 in the pinned place."""
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
    """Reshape to (blocks, members): dimensions along which both sides vary count blocks, the rest members."""
    dims = range(index.dim())
    both = [dim for dim in dims if entry.plus.shape[dim] > 1 and entry.minus.shape[dim] > 1]
    blocks = torch.Size([index.shape[dim] for dim in both]).numel()
    return index.permute([*both, *(dim for dim in dims if dim not in both)]).reshape(blocks, -1)


def balance(counts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    r"""Fit :math:`r_i + c_j` to logarithms that some pairs (i, j) have and others lack, behind `rz_scaling`.

    It minimises :math:`\sum (\log|w| - r_i - c_j)^2` over the logarithms there are, sums L of C each:

    .. math:: \begin{pmatrix} \mathrm{diag}(C1) & C \\ C^\top & \mathrm{diag}(C^\top 1) \end{pmatrix}
              \begin{pmatrix} r \\ c \end{pmatrix} = \begin{pmatrix} L1 \\ L^\top 1 \end{pmatrix},

    a bipartite Laplacian up to signs. The longer side is eliminated. Of the :math:`r + t, c - t` on a connected
    component it returns the one in which rows and columns explain half each; 0 for rows without logarithms.
    """
    if counts.shape[-2] < counts.shape[-1]:
        columns, rows = balance(counts.mT, sums.mT)
        return rows, columns

    row_sum, column_sum = sums.sum(-1), sums.sum(-2)
    row_count, column_count = counts.sum(-1), counts.sum(-2)
    row_root, column_root = _reciprocal(row_count).sqrt(), _reciprocal(column_count).sqrt()

    def rows_for(columns: Tensor) -> Tensor:
        return (row_sum - _apply(counts, columns)) * _reciprocal(row_count)

    def system(vector: Tensor) -> Tensor:
        return vector - column_root * _apply(counts.mT, _apply(counts, column_root * vector) * _reciprocal(row_count))

    # The unknown is the change from here, in coordinates where the system is I - BᵀB with
    # B = diag(C1)^(-1/2) C diag(Cᵀ1)^(-1/2). It stays orthogonal to the null vectors, so that each component keeps the
    # half that it is given here.
    columns = column_sum * _reciprocal(column_count) / 2
    defect = (column_sum - _apply(counts.mT, rows_for(columns)) - column_count * columns) * column_root
    scale = (column_root * column_sum).norm(dim=-1) + (row_root * row_sum).norm(dim=-1)
    goal = torch.finfo(counts.dtype).eps * scale
    columns = columns + conjugate_gradients(system, defect, goal) * column_root
    return rows_for(columns), columns


def _reciprocal(counts: Tensor) -> Tensor:
    # A row or column without logarithms gets the scale exp(0).
    return torch.where(counts > 0, 1 / counts, 0.0)


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def conjugate_gradients(
    system: Callable[[Tensor], Tensor], right: Tensor, goal: Tensor, max_iterations: int = 2000
) -> Tensor:
    """Solve `system(y) = right`; of a singular system the solution of least norm. Hestenes and Stiefel 1952.

    It starts again until the true residual, which rounding parts from the residual carried along, is small enough or
    stops falling. `right` has shape (…, n), problems in front, and is in the system's range up to rounding; `goal`,
    (…), is the norm of a residual that is small enough.
    """
    solution, least = torch.zeros_like(right), math.inf
    for _ in range(4):
        residual = right - system(solution)
        worst = max(_device.read(residual.norm(dim=-1) / goal.clamp_min(torch.finfo(goal.dtype).tiny)), default=0.0)
        if not 1 < worst < 0.5 * least:
            break
        solution, least = solution + _descend(system, residual, goal, max_iterations), worst
    return solution


def _descend(system: Callable[[Tensor], Tensor], right: Tensor, goal: Tensor, max_iterations: int) -> Tensor:
    solution, residual, direction = torch.zeros_like(right), right, right
    gamma = right.square().sum(-1)
    for number in range(max_iterations):
        is_open = gamma > goal.square()
        if number % _BETWEEN_LOOKS == 0 and all(_device.read(~is_open.any())):
            break
        moved = system(direction)
        # A problem that is solved must not go on: only rounding is left, which a singular system cannot solve.
        step = torch.where(is_open, gamma / (direction * moved).sum(-1), 0.0)[..., None]
        solution = solution + step * direction
        residual = residual - step * moved
        previous, gamma = gamma, residual.square().sum(-1)
        direction = residual + torch.where(is_open, gamma / previous, 0.0)[..., None] * direction
    return solution
