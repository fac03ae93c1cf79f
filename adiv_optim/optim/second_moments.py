"""Second moments of the rows that a layer reads: which sums are kept, what they tell, and sums over processes.

None of these holds a number: sums are lists of tensors that others hold, `memory` those with the factor decay^age.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn

from .._linalg import host
from .._linalg.roots import Spectrum, followed
from .._linalg.shards import Group, add_up, local
from .._linalg.strips import joined, strips_of
from ..attach.layers import Layout
from ..functional.linears import gram_of
from ..functional.lines import costs, lines_pay, sums_by_lines
from ..functional.patches import Patches


class MeanSquare:
    """The sum of the squares of what a layer reads; the bias has no place in it."""

    with_memory = False

    def __init__(self, module: nn.Module) -> None:
        #: How many entries it reads at a position, of all groups of a convolution.
        layout = Layout.of(module)
        self.features = layout.features(local(module.get_parameter("weight"))) * layout.groups
        self.key: tuple[Any, ...] = (type(self), self.features)

    def zeros(self, weight: Tensor) -> list[Tensor]:
        """The memory before the first row."""
        return [torch.zeros(1, dtype=host.wide(weight), device=weight.device)]

    no_rows = zeros

    def anew(self, module: nn.Module) -> "MeanSquare":
        """The same sums of a layer that has other shapes now."""
        return MeanSquare(module)

    def sums(self, patches: Patches, memory: list[Tensor], one: int, turn: int) -> Iterator[tuple[list[Tensor], int]]:
        """Yield sums over parts of what is read, with the number of rows in each."""
        norms = patches.squared_norm().to(memory[0].dtype)  # (N, groups, *positions)
        yield [norms.sum().view(1)], norms[:, 0].numel()

    def work(self, patches: Patches) -> float:
        """The multiplications in whose time a call is summed."""
        return float(patches.input.numel())

    def updated(self, memory: list[Tensor], sums: list[Tensor], decay: float) -> list[Tensor]:
        """The memory once sums have been added to it; made anew, since a checkpoint may hold the old one."""
        return _decayed(memory, sums, decay)

    def rms(self, memory: list[Tensor], rows: float) -> Tensor:
        """The root of the mean square of an entry, (1,)."""
        return (memory[0] / (rows * self.features)).sqrt()


class Covariance:
    r"""The sums that make A, the mean of :math:`\tilde x \tilde x^\top` over the rows that a layer reads.

    x~ = (x, 1) where the bias is treated with the weight. Of wide layers diagonal blocks of A alone; of each block,
    which is symmetric, strips of rows from the diagonal on: little more than half of the products and of the memory.

    Args:
        module: the layer.
        with_bias: whether x~ has a 1.
        max_dim: how many columns a block has at most; None is no limit.
        max_rows: how many rows of a forward pass count at most; None is all.
    """

    #: Whether patches are summed by lines, which give the whole of XᵀX.
    by_lines = True
    #: Whether sums are products with the memory, and belong to no other.
    with_memory = False

    def __init__(self, module: nn.Module, with_bias: bool, max_dim: int | None, max_rows: int | None) -> None:
        layout = Layout.of(module)
        self.groups, self.with_bias, self.max_dim, self.max_rows = layout.groups, with_bias, max_dim, max_rows
        features = layout.features(local(module.get_parameter("weight")))
        self.size = features + with_bias
        count = 1 if max_dim is None else -(-self.size // max_dim)
        ends = [*(self.size * k // count for k in range(count)), features]
        #: Nearly equal slices of the features; the last one has the 1 beside it.
        self.blocks = [slice(a, b) for a, b in pairwise(ends)]
        self.sizes = [block.stop - block.start for block in self.blocks]
        self.sizes[-1] += with_bias
        #: Equal for layers that make the same sums of one input.
        self.key: tuple[Any, ...] = (type(self), self.groups, *self.sizes, with_bias, max_rows)

    def anew(self, module: nn.Module) -> "Covariance":
        """The same sums of a layer that has other shapes now."""
        return Covariance(module, self.with_bias, self.max_dim, self.max_rows)

    def __str__(self) -> str:
        """Say how many columns are told apart."""
        low, high, count = min(self.sizes), max(self.sizes), len(self.sizes)
        return f"{high} columns" if count == 1 else f"{count} blocks of {low} to {high} columns"

    def _shapes(self) -> list[tuple[int, ...]]:
        return [(self.groups, b - a, size - a) for size in self.sizes for a, b in strips_of(size)]

    def zeros(self, weight: Tensor) -> list[Tensor]:
        """The memory before the first row."""
        return [torch.zeros(shape, dtype=host.wide(weight), device=weight.device) for shape in self._shapes()]

    def no_rows(self, weight: Tensor) -> list[Tensor]:
        """The sums of a process whose batch did not reach the layer."""
        return self.zeros(weight)

    def sums(self, patches: Patches, memory: list[Tensor], one: int, turn: int) -> Iterator[tuple[list[Tensor], int]]:
        """Yield sums over parts of what is read, with the number of rows in each.

        `one` is what rows have in the place of the bias: 1, or 0 of rows of derivatives. `turn` chooses the rows that
        count where not all do.
        """
        patches = patches if self.max_rows is None else patches.spread(self.max_rows, turn)
        if self.by_lines and len(self.sizes) == 1 and lines_pay(patches):
            number = len(patches.input) * patches.positions
            yield self._products_of_lines(patches, memory[0].dtype, one, number), number
            return
        for rows in (part.unfold() for part in patches.slices(memory[0].dtype)):
            yield self._products(rows, memory, one), rows.shape[1]

    def work(self, patches: Patches) -> float:
        """The multiplications in whose time a call is summed, and the blocks of A are factorised."""
        patches = patches if self.max_rows is None else patches.spread(self.max_rows, 0)
        by_lines, unfolded = costs(patches)
        sums = min(by_lines, unfolded) if len(self.sizes) == 1 else unfolded / len(self.sizes)
        return sums + self.groups * sum(size**3 for size in self.sizes)

    def _products_of_lines(self, patches: Patches, dtype: torch.dtype, one: int, number: int) -> list[Tensor]:
        gram, total = sums_by_lines(patches, dtype)
        if self.with_bias:
            count = gram.new_full((self.groups, 1, 1), number)
            gram = torch.cat([torch.cat([gram, one * total], -1), one * torch.cat([total.mT, count], -1)], -2)
        return [gram[..., a:b, a:].clone() for a, b in strips_of(*self.sizes)]

    def _products(self, rows: Tensor, memory: list[Tensor], one: int) -> list[Tensor]:
        strips: list[Tensor] = []
        for block, size in zip(self.blocks, self.sizes, strict=True):
            columns = rows[..., block]
            strips += [gram_of([columns[..., a:b]], [columns[..., a:]]) for a, b in strips_of(size)]
        if self.with_bias:  # the 1 of x~ is the last column of the last block, and its last row
            total, count = one * columns.sum(-2), rows.new_full((self.groups, 1, 1), one * rows.shape[-2])
            places = strips_of(size)
            for number, (a, b) in enumerate(places, start=len(strips) - len(places)):
                strips[number] = torch.cat([strips[number], total[..., a : min(b, size - 1), None]], -1)
            last_row = torch.cat([total[..., None, a:], count], -1)
            strips[-1] = torch.cat([strips[-1], last_row], -2)
        return strips

    def updated(self, memory: list[Tensor], sums: list[Tensor], decay: float) -> list[Tensor]:
        """The memory once sums have been added to it; made anew, since a checkpoint may hold the old one."""
        return _decayed(memory, sums, decay)

    def traces(self, memory: list[Tensor]) -> list[Tensor]:
        """The trace of each block, or of its strips, for each group."""
        return [strip.diagonal(dim1=-2, dim2=-1).sum(-1) for strip in memory]

    def average(self, memory: list[Tensor], rows: float) -> Tensor:
        """The mean eigenvalue of A for each group; (), if there is one group."""
        return self.of_groups(torch.stack(self.traces(memory)).sum(0) / (rows * self.size))

    def of_groups(self, stack: Tensor) -> Tensor:
        """The stack of several groups, or the one matrix of a single group: some libraries batch on one thread."""
        return stack if self.groups > 1 else stack[0]

    def extremes(self, memory: list[Tensor], rows: float) -> Tensor:
        """The least and the greatest eigenvalue of each block of A, (2, blocks); for each group, if several."""
        values = [torch.linalg.eigvalsh(host.double(block)).clamp_min(0) for block in self.mean(memory, rows)]
        return torch.stack([torch.stack([each[..., end] for each in values]) for end in (0, -1)])

    def mean(self, memory: list[Tensor], rows: float) -> list[Tensor]:
        """The blocks of A, made anew, each (groups, d, d), or (d, d) of one group."""
        strips = iter(memory)
        blocks = [joined([next(strips) for _ in strips_of(size)]) for size in self.sizes]
        return [self.of_groups(block).div_(rows) for block in blocks]


class SketchedCovariance(Covariance):
    r"""The leading eigenvectors U of A and their eigenvalues Λ, by one step of subspace iteration a measurement.

    .. math:: S = \tilde X^\top (\tilde X U) + \mathrm{decay} \cdot U \Lambda, \qquad
              U' \Lambda' U'^\top \approx S (U^\top S)^{-1} S^\top

    and A's trace is kept beside them: 4 n d rank multiplications for n rows, and d rank numbers, where A itself takes
    n d² and d². What earlier rows had outside of U counts in the trace alone. The memory of a block is U, UΛ and the
    trace; sums are those of S and of the trace. `rank` of each block is less than it has columns; for the other
    arguments see `Covariance`.
    """

    by_lines, with_memory = False, True

    def __init__(
        self, module: nn.Module, with_bias: bool, max_dim: int | None, max_rows: int | None, rank: int
    ) -> None:
        super().__init__(module, with_bias, max_dim, max_rows)
        self.rank = rank
        self.key = (*self.key, rank)

    def anew(self, module: nn.Module) -> Covariance:
        whole = super().anew(module)
        if self.rank >= min(whole.sizes):
            return whole
        return SketchedCovariance(module, self.with_bias, self.max_dim, self.max_rows, self.rank)

    def work(self, patches: Patches) -> float:
        rows = self.groups * len(patches.input) * patches.positions
        return 4.0 * rows * self.size * self.rank

    def zeros(self, weight: Tensor) -> list[Tensor]:
        """The memory before the first row: U is orthonormal columns by chance, the same on all processes."""
        found: list[Tensor] = []
        for size in self.sizes:
            drawn = torch.randn(
                size, self.rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu"
            )
            basis = torch.linalg.qr(drawn).Q.to(weight.device, host.wide(weight)).repeat(self.groups, 1, 1)
            found += [basis, torch.zeros_like(basis), basis.new_zeros(self.groups)]
        return found

    def no_rows(self, weight: Tensor) -> list[Tensor]:
        return [tensor for place, tensor in enumerate(self.zeros(weight)) if place % 3]

    def _products(self, rows: Tensor, memory: list[Tensor], one: int) -> list[Tensor]:
        found: list[Tensor] = []
        for number, (block, basis) in enumerate(zip(self.blocks, memory[::3], strict=True)):
            x, u = self.of_groups(rows[..., block]), self.of_groups(basis.to(rows))
            inside, square = x @ u[..., : x.shape[-1], :], torch.linalg.vector_norm(x, dim=(-2, -1)).square()
            if biased := self.with_bias and number == len(self.blocks) - 1:
                inside += one * u[..., -1:, :]
                square += one * x.shape[-2]
            parts = [gram_of([inside], [x]).mT, *[one * inside.sum(-2, keepdim=True)] * biased]
            found += [torch.cat(parts, -2).view(basis.shape), square.view(self.groups)]
        return found

    def updated(self, memory: list[Tensor], sums: list[Tensor], decay: float) -> list[Tensor]:
        """The memory with the next eigenvectors.

        Raises:
            NoRootError: they could not be found.
        """
        before = [tensor for place, tensor in enumerate(memory) if place % 3]
        sketches = _decayed(before, sums, decay)
        found: list[Tensor] = []
        for basis, sketch, trace in zip(memory[::3], sketches[::2], sketches[1::2], strict=True):
            level = self.of_groups(trace) / basis.shape[-2]
            values, vectors = followed(self.of_groups(sketch), self.of_groups(basis.to(sketch)), level)
            vectors = vectors.view(basis.shape)
            found += [vectors, vectors * values.view(self.groups, 1, self.rank), trace]
        return found

    def traces(self, memory: list[Tensor]) -> list[Tensor]:
        return memory[2::3]

    def extremes(self, memory: list[Tensor], rows: float) -> Tensor:
        """Of what is used in the place of A: all eigenvalues but the leading ones are their mean."""
        found = []
        for (trace, (values, _)), size in zip(self.spectra(memory, rows), self.sizes, strict=True):
            rest = ((trace - values.sum(-1)) / (size - self.rank)).clamp_min(0)
            found.append(torch.stack([torch.minimum(rest, values.amin(-1)), torch.maximum(rest, values.amax(-1))]))
        return torch.stack(found, 1)

    def spectra(self, memory: list[Tensor], rows: float) -> list[tuple[Tensor, Spectrum]]:
        """The trace of every block of A, for each group, and its leading eigenvalues and eigenvectors."""
        return [
            (
                self.of_groups(trace) / rows,
                # Not by the norm of UΛ: squares of large inputs' squares would leave float32's range.
                Spectrum(self.of_groups((basis * sketch).sum(-2)) / rows, self.of_groups(basis)),
            )
            for basis, sketch, trace in zip(memory[::3], memory[1::3], memory[2::3], strict=True)
        ]


Moments = MeanSquare | Covariance


def _decayed(memory: Iterable[Tensor], sums: Iterable[Tensor], decay: float) -> list[Tensor]:
    return [new.add(old.to(new), alpha=decay) if decay else new for new, old in zip(sums, memory, strict=True)]


def add_up_rows(layers: Sequence[Any], group: Group) -> None:
    """Add up what is pending over processes, for all layers that any of them has seen, so that all take part.

    Layers go on sharing their sums if they share them on every process.
    """
    own = [[layer.pending_rows, id(layer.pending) if layer.pending_rows else 0] for layer in layers]
    size, device = distributed.get_world_size(group), layers[0].weight.device
    every = torch.zeros(size, len(layers), 2, dtype=torch.int64, device=device)
    every[distributed.get_rank(group)] = torch.tensor(own, device=device)
    add_up([every], group)
    first: dict[tuple[int, ...], Any] = {}
    blocks: list[Tensor] = []
    for layer, (rows, lists) in zip(layers, every.permute(1, 2, 0).tolist(), strict=True):
        if not any(rows):
            continue
        layer.pending_rows = sum(rows)
        other = first.setdefault(tuple(lists), layer)
        if other is not layer:
            layer.pending = other.pending
            continue
        pending = layer.moments.no_rows(layer.weight) if layer.pending is None else layer.pending
        layer.pending = [tensor.clone() for tensor in pending]  # others may share it here, and not elsewhere
        blocks += layer.pending
    add_up(blocks, group)
