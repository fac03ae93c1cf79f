"""The running covariance of a layer's inputs."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from .._linalg.shards import local, stacked
from .._linalg.strips import joined, strips_of
from ..attach.rows import patches_of
from ..functional.linears import gram_of
from .followers import Following, Readers
from .rows import Layout, features_of


class Limits(NamedTuple):
    """Of a covariance.

    Args:
        columns: how many a block has at most; None is no limit.
        rows: how many of a forward pass count at most; None is all.
    """

    columns: int | None
    rows: int | None


class InputCovariance(Following):
    r"""The sums that make A, the mean of :math:`\tilde x \tilde x^\top` over the rows that a layer reads.

    x~ = (x, 1) where a bias trains. Of wide layers diagonal blocks of A alone.

    Args:
        name: as for `InputSums`, and the next two.
        modules: layers.
        with_bias: whether the bias is treated with the weight.
        limits: of what is kept.
        readers: shared by layers that may follow each other.
    """

    def __init__(self, name: str, modules: list[nn.Module], with_bias: bool, limits: Limits, readers: Readers) -> None:
        self.layout, self.blocks = Layout.of(modules[0]), blocks_of(modules[0], with_bias, limits.columns)
        self.limit, self.readers = limits.rows, readers
        super().__init__(name, modules, with_bias)

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key, equal for layers that make the same sums of one input."""
        return type(self), *self.sizes, self.with_bias, self.dtype, self.weight.device

    @property
    def sizes(self) -> list[int]:
        """Columns of every block, the 1 included."""
        return sizes_of(self.blocks, self.with_bias)

    @property
    def size(self) -> int:
        """How many columns A has, those of other processes included."""
        return self.weight.shape[1] if self.cut else sum(self.sizes)

    def columns(self) -> str:
        """Say how many columns every block has."""
        sizes = self.sizes
        found = (
            f"{sizes[0]} columns" if len(sizes) == 1 else f"{len(sizes)} blocks of {min(sizes)} to {max(sizes)} columns"
        )
        return f"{found}, apart from the others of {self.size}, which other processes hold" if self.cut else found

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes for the blocks held here, then that of the trace of all blocks where processes hold others."""
        return [*self.shapes_here, *[(self.groups,)] * bool(self.cut)]

    @property
    @abstractmethod
    def shapes_here(self) -> list[tuple[int, ...]]:
        """The shapes of the sums for the blocks held here."""

    @abstractmethod
    def sums_here(self, rows: Tensor, one: int) -> list[Tensor]:
        """The sums for the blocks held here, over rows (groups, n, features) with `one` in the place of the bias."""

    @abstractmethod
    def traces(self, kept: list[Tensor]) -> list[Tensor]:
        """The trace of each block, for each group, by its sums."""

    def sums(self, module: nn.Module, input: Tensor, one: int = 1) -> Iterator[tuple[list[Tensor], int]]:
        """Yield sums over rows."""
        patches = patches_of(module, input)
        for _, rows in (patches if self.limit is None else patches.spread(self.limit, self.turn)).parts(self.dtype):
            kept = self.sums_here(rows, one)
            yield kept + [_added(self.traces(kept))] * bool(self.cut), rows.shape[1]

    def average(self) -> Tensor:
        """The mean eigenvalue of A, those of other processes included, for each group; (), if there is one group."""
        total = self.total or []
        return self.of_groups((total[-1] if self.cut else _added(self.traces(total))) / (self.rows * self.size))

    def of_groups(self, stack: Tensor) -> Tensor:
        """The stack of several groups, or the one matrix of a single group: some libraries batch on one thread."""
        return stack if self.groups > 1 else stack[0]

    def filled(self) -> dict[str, Any]:
        """Return the memory in the same shapes whether anything has been seen or not."""
        found = super().filled()
        if self.cut is None:
            return found
        count = distributed.get_world_size(self.cut.group)
        if self.size % count:
            raise ValueError(
                f"{self.name!r} has {self.size} columns on {count} processes; their "
                "averages are of different sizes, which torch.distributed.checkpoint has no name for. Save each "
                "process's own state_dict() by torch.save, or choose a width that the processes divide."
            )
        return pytree.tree_map_only(Tensor, lambda part: stacked(part, self.weight), found)

    def emptied(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `state_dict` that was `filled`."""
        if self.cut is not None:
            state = pytree.tree_map_only(Tensor, lambda part: local(part)[0], dict(state))
        return super().emptied(state)


class WholeCovariance(InputCovariance):
    """A itself. Of each block, which is symmetric, strips of rows are kept from the diagonal on.

    That is little more than half of the products and of the memory.
    """

    @property
    def shapes_here(self) -> list[tuple[int, ...]]:
        """The strips."""
        return [(self.groups, b - a, size - a) for size in self.sizes for a, b in strips_of(size)]

    def sums_here(self, rows: Tensor, one: int) -> list[Tensor]:
        """Sums of x~ x~ᵀ."""
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

    def traces(self, kept: list[Tensor]) -> list[Tensor]:
        """The traces of the strips, which together are those of the blocks."""
        return [strip.diagonal(dim1=-2, dim2=-1).sum(-1) for strip in kept]

    def mean(self) -> list[Tensor]:
        """The blocks of A, made anew, each (groups, d, d), or (d, d) of one group."""
        strips = iter(self.total or ())
        blocks = [joined([next(strips) for _ in strips_of(size)]) for size in self.sizes]
        return [self.of_groups(block).div_(self.rows) for block in blocks]


def blocks_of(module: nn.Module, with_bias: bool, columns: int | None) -> list[slice]:
    """Nearly equal slices of a layer's features, so that each, with the bias, has at most so many columns."""
    features = features_of(module)
    size = features + with_bias
    count = 1 if columns is None else -(-size // columns)
    ends = [*(size * k // count for k in range(count)), features]
    return [slice(a, b) for a, b in pairwise(ends)]


def sizes_of(blocks: list[slice], with_bias: bool) -> list[int]:
    """How many columns blocks have, the 1 included."""
    sizes = [block.stop - block.start for block in blocks]
    sizes[-1] += with_bias
    return sizes


def _added(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)
