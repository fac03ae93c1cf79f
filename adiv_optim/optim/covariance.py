"""The running covariance of a layer's inputs."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from .._linalg.roots import Spectrum, leading
from .._linalg.shards import local, stacked
from ..attach.rows import patches_of
from ..functional.linears import gram_of
from .checkpoint import Maybe, check, numbers
from .rows import Layout, features_of
from .sums import InputSums

#: How many rows of A are one strip.
STRIP = 128


class InputCovariance(InputSums):
    r"""A = mean of :math:`\tilde x \tilde x^\top` over the rows that a layer reads, x~ = (x, 1) where a bias trains.

    Wide layers keep diagonal blocks of A only. Of each block, which is symmetric, strips of rows are kept from the
    diagonal on: little more than half of the products and of the memory.
    """

    def __init__(
        self, name: str, modules: list[nn.Module], with_bias: bool, rank: int | None, max_dim: int | None
    ) -> None:
        self.rank, self.blocks = rank, _blocks(features_of(modules[0]), with_bias, max_dim)
        self.layout = Layout.of(modules[0])
        super().__init__(name, modules, with_bias)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        #: The leading eigenvectors of every block, or None where they are not followed.
        self.spectra: list[Spectrum | None] = [None for _ in self.blocks]

    @property
    def sizes(self) -> list[int]:
        """Columns of every block, the 1 included."""
        sizes = [block.stop - block.start for block in self.blocks]
        sizes[-1] += self.with_bias
        return sizes

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The strips of all blocks for each group, and the trace of all blocks where processes hold others."""
        strips = [(self.groups, b - a, size - a) for size in self.sizes for a, b in _strips(size)]
        return [*strips, *[(self.groups,)] * bool(self.cut)]

    def columns(self) -> str:
        """Say how many columns every block has."""
        sizes = self.sizes
        found = (
            f"{sizes[0]} columns" if len(sizes) == 1 else f"{len(sizes)} blocks of {min(sizes)} to {max(sizes)} columns"
        )
        return f"{found}, apart from the others of {self.size}, which other processes hold" if self.cut else found

    def sums(self, module: nn.Module, input: Tensor) -> Iterator[tuple[list[Tensor], int]]:
        """Yield sums of x~ x~ᵀ."""
        for _, rows in patches_of(module, input).parts(self.dtype):
            ones = [rows.new_ones(*rows.shape[:-1], 1)] * self.with_bias
            strips: list[Tensor] = []
            for number, (block, size) in enumerate(zip(self.blocks, self.sizes, strict=True)):
                columns, one = rows[..., block], ones if number == len(self.blocks) - 1 else []
                for a, b in _strips(size):
                    strips.append(gram_of([columns[..., a:b], *(one if b == size else [])], [columns[..., a:], *one]))
            yield strips + [_trace(strips)] * bool(self.cut), rows.shape[1]

    def absorb(self, decay: float) -> None:
        """Let what was seen since the last time into the average.

        Raises:
            NoRootError: its leading eigenvectors could not be found; the average has been updated.
        """
        super().absorb(decay)
        self._follow()

    def mean(self) -> list[Tensor]:
        """The blocks of A, each (groups, d, d), or (d, d) of one group: some libraries batch on one thread."""
        if not self.total:
            return []
        strips = iter(self.total)
        blocks = [_whole([next(strips) for _ in _strips(size)]) for size in self.sizes]
        return [(block if self.groups > 1 else block[0]) / self.rows for block in blocks]

    @property
    def size(self) -> int:
        """How many columns A has, those of other processes included."""
        return self.weight.shape[1] if self.cut else sum(self.sizes)

    def average(self) -> Tensor:
        """The mean eigenvalue of A, those of other processes included, for each group; see `mean` for its shape."""
        total = self.total or []
        trace = total[-1] if self.cut else _trace(total)
        return (trace if self.groups > 1 else trace[0]) / (self.rows * self.size)

    def _follow(self) -> None:
        if self.rank is None:
            return
        for number, (block, last) in enumerate(zip(self.mean(), self.spectra, strict=True)):
            if self.rank < block.shape[-1]:
                self.spectra[number] = leading(block, self.rank, last and last.vectors.to(block))

    def state_dict(self) -> dict[str, Any]:
        """Return the memory."""
        return {**super().state_dict(), "spectra": [s and tuple(s) for s in self.spectra]}

    def filled(self) -> dict[str, Any]:
        """Return the memory in the same shapes whether anything has been seen or not."""
        # Lists: torch.distributed.checkpoint looks for tensors in those, and pickles tuples once for all processes.
        spectra: list[Any] = [found and list(found) for found in self.spectra]
        stack = (self.groups,) if self.groups > 1 else ()
        for number, (found, size) in enumerate(zip(spectra, self.sizes, strict=True)):
            if found is None and self.rank is not None and self.rank < size:
                shapes = (*stack, self.rank), (*stack, size, self.rank)
                spectra[number] = [torch.zeros(shape, dtype=self.dtype, device=self.weight.device) for shape in shapes]
        found = {**super().filled(), "spectra": spectra}
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
        spectra = [found if found is not None and bool(found[1].any()) else None for found in state.get("spectra", ())]
        return {**super().emptied(state), "spectra": spectra}

    def wanted(self) -> dict[str, Any]:
        """What `state_dict` holds; as many eigenvectors as it likes: of another rank, they are found anew."""
        stack = (self.groups,) if self.groups > 1 else ()
        spectra = [Maybe([numbers((*stack, None)), numbers((*stack, size, None))]) for size in self.sizes]
        return {**super().wanted(), "spectra": spectra}

    def check_state_dict(self, state: Any, path: str, remedy: str) -> None:
        """Raise a ValueError if the memory is of a layer of another size, or damaged; see `checkpoint.check`."""
        super().check_state_dict(state, path, remedy)
        for place, found in enumerate(state["spectra"]):
            if found is not None:
                vectors = numbers((*found[1].shape[:-1], found[0].shape[-1]))
                check(found[1], vectors, f"{path}['spectra'][{place}][1]", remedy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the memory from a checkpoint."""
        super().load_state_dict(state)
        device = self.weight.device
        found = [s and Spectrum(*(part.to(device, self.dtype) for part in s)) for s in state["spectra"]]
        if {s.values.shape[-1] for s in found if s} <= {self.rank}:
            self.spectra = found
        if self.total and self.rank is not None and not any(self.spectra):
            self._follow()  # the checkpoint is of another rank


def _trace(strips: list[Tensor]) -> Tensor:
    return torch.stack([strip.diagonal(dim1=-2, dim2=-1).sum(-1) for strip in strips]).sum(0)


def _strips(size: int) -> list[tuple[int, int]]:
    """Rows of the strips of a block, nearly equal."""
    count = max(1, size // STRIP)
    return list(pairwise(size * k // count for k in range(count + 1)))


def _whole(strips: list[Tensor]) -> Tensor:
    """The symmetric matrix of strips that begin at its diagonal."""
    matrix = strips[0].new_empty(*strips[0].shape[:-2], strips[0].shape[-1], strips[0].shape[-1])
    start = 0
    for strip in strips:
        end = start + strip.shape[-2]
        matrix[..., start:end, start:] = strip
        matrix[..., start:, start:end] = strip.mT
        start = end
    return matrix


def _blocks(features: int, with_bias: bool, max_dim: int | None) -> list[slice]:
    """Nearly equal slices of the features, so that each, with the bias, stays within `max_dim`."""
    columns = features + with_bias
    count = 1 if max_dim is None else -(-columns // max_dim)
    ends = [*(columns * k // count for k in range(count)), features]
    return [slice(a, b) for a, b in pairwise(ends)]
