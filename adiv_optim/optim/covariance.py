"""Second moments of the rows that a layer reads: exponentially weighted sums of x~x~ᵀ, their means and roots.

They are immutable: a measurement that is cut short leaves the old ones, and a checkpoint may have their tensors.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _device
from ..functional.lines import is_cheaper_by_lines, sums_by_lines
from ..functional.patches import Patches, cross_gram
from ..rows.layers import Layout
from .roots import RightFactor, Whole, inverse_root

#: The least damping, in ε of the sums for each column: below it steps would be made of rounding of A.
LEAST_DAMPING = 10


class Sums(NamedTuple):
    """Sums over some rows: a tensor for each part of the statistics that rows are added to."""

    parts: list[Tensor]
    rows: int

    def plus(self, other: "Sums | None") -> "Sums":
        """Return the sums over these rows and others, made anew; the same where there are no others."""
        if other is None:
            return self
        return Sums([a + b for a, b in zip(self.parts, other.parts, strict=True)], self.rows + other.rows)


class MeanSquare:
    """The mean square of the entries that a layer reads; the bias has no place in it."""

    #: Whether sums are products with the statistics, and belong to no other.
    depends_on_statistics = False
    #: The inputs, block by block, that a factor multiplies.
    blocks: Sequence[slice] = (slice(None),)

    def __init__(self, module: nn.Module, with_bias: bool = False) -> None:
        weight, layout = _device.local(module.get_parameter("weight")), Layout.of(module)
        self.groups, self.features = layout.groups, layout.features(weight)
        #: Sums with fading weights, and the number of their rows, which fades likewise.
        self.statistics, self.rows = self._zeros(weight.device, _device.wide_dtype(weight)), 0.0

    def _zeros(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return the statistics before the first row."""
        return [torch.zeros(1, dtype=dtype, device=device)]

    def no_sums(self) -> Sums:
        """Return the sums of a process whose batch did not reach the layer."""
        return Sums([torch.zeros_like(tensor) for tensor in self.statistics], 0)

    def sums(self, patches: Patches, dtype: torch.dtype, bias_entry: int) -> Iterator[Sums]:
        """Yield sums over parts of the input; `bias_entry` is 1, or 0 of rows of derivatives."""
        norms = patches.squared_norm().to(dtype)  # (N, groups, *positions)
        yield Sums([norms.sum().view(1)], norms[:, 0].numel())

    def updated(self, sums: Sums, decay: float) -> Self:
        """Return it with further sums, older ones times decay; a LinAlgError where float64 has no eigenvectors."""
        return self.with_statistics(decayed(self.statistics, sums.parts, decay), decay * self.rows + sums.rows)

    def with_statistics(self, statistics: list[Tensor], rows: float) -> Self:
        """Return the same with another statistics, of so many rows."""
        other = copy.copy(self)
        other.statistics, other.rows = statistics, rows
        return other

    def mean_square(self) -> Tensor:
        """Return the mean square of an entry, (1,)."""
        return self.statistics[0] / (self.rows * self.groups * self.features)


class Covariance(MeanSquare):
    r"""A, the mean of :math:`\tilde x \tilde x^\top` over the rows that a layer reads.

    x~ = (x, 1) if `with_bias`. Wide layers keep diagonal blocks of A alone, of at most `max_dim` columns.
    """

    def __init__(self, module: nn.Module, with_bias: bool, max_dim: int | None) -> None:
        self.with_bias = with_bias
        weight = _device.local(module.get_parameter("weight"))
        features = Layout.of(module).features(weight)
        self.size = features + with_bias
        count = 1 if max_dim is None else -(-self.size // max_dim)
        ends = [*(self.size * k // count for k in range(count)), features]
        # Nearly equal slices of the features; the last one has the 1 beside it.
        self.blocks = [slice(a, b) for a, b in pairwise(ends)]
        self.sizes = [block.stop - block.start for block in self.blocks]
        self.sizes[-1] += with_bias
        super().__init__(module)

    def __str__(self) -> str:
        """Say how many columns are told apart."""
        low, high, count = min(self.sizes), max(self.sizes), len(self.sizes)
        return f"{high} columns" if count == 1 else f"{count} blocks of {low} to {high} columns"

    def _zeros(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(self.groups, size, size, dtype=dtype, device=device) for size in self.sizes]

    def sums(self, patches: Patches, dtype: torch.dtype, bias_entry: int) -> Iterator[Sums]:
        # Lines give the whole of XᵀX.
        if patches.kernel and not self.depends_on_statistics and len(self.sizes) == 1 and is_cheaper_by_lines(patches):
            number = len(patches.input) * patches.positions
            yield Sums([self._bordered(*sums_by_lines(patches, dtype), number, bias_entry)], number)
            return
        for rows in (part.unfold() for part in patches.slices(dtype)):
            yield Sums(self._products(rows, bias_entry), rows.shape[1])

    def _products(self, rows: Tensor, bias_entry: int) -> list[Tensor]:
        parts = [rows[..., block] for block in self.blocks]
        *products, last = [cross_gram([part], [part]) for part in parts]
        return [*products, self._bordered(last, parts[-1].sum(-2)[..., None], rows.shape[-2], bias_entry)]

    def _bordered(self, gram: Tensor, total: Tensor, count: int, bias_entry: int) -> Tensor:
        """Return XᵀX with the last column and the last row of the bias, of the sum of so many rows, if it has one."""
        if not (self.with_bias and bias_entry):
            return F.pad(gram, (0, 1, 0, 1)) if self.with_bias else gram
        last_row = torch.cat([total.mT, gram.new_full((self.groups, 1, 1), count)], -1)
        return torch.cat([torch.cat([gram, total], -1), last_row], -2)

    def traces(self) -> list[Tensor]:
        """Return the trace of each block, for each group."""
        return [block.diagonal(dim1=-2, dim2=-1).sum(-1) for block in self.statistics]

    def mean_square(self) -> Tensor:
        """Return the mean eigenvalue of A for each group, (groups,)."""
        return torch.stack(self.traces()).sum(0) / (self.rows * self.size)

    def ridge(self, damping: float) -> Tensor:
        """Return λ of each group: the damping, or the least, times A's mean eigenvalue, or times 1 where that is 0."""
        level = self.mean_square()
        least = LEAST_DAMPING * torch.finfo(level.dtype).eps * self.size
        return max(damping, least) * torch.where(level > 0, level, 1.0)

    def mean(self) -> list[Tensor]:
        """Return the blocks of A, made anew, each (groups, d, d)."""
        return [block / self.rows for block in self.statistics]

    def inverse_roots(self, damping: float, graft_norm: bool) -> Sequence[RightFactor]:
        """Return the inverse root of A + λI, with `graft_norm` over its mean eigenvalue, by block; or a LinAlgError."""
        ridge = self.ridge(damping)
        scale = self.mean_square() + ridge if graft_norm else torch.ones_like(ridge)
        return self._inverse_roots(scale, ridge / scale, self.size / damping + 1)

    def _inverse_roots(self, scale: Tensor, ridge: Tensor, condition: float) -> Sequence[RightFactor]:
        """Return the inverse roots of A / scale + ridge I, whose condition numbers are at most `condition`."""
        blocks = ((block / scale[..., None, None]).div_(self.rows) for block in self.statistics)
        return [Whole(inverse_root(block, ridge, condition)) for block in blocks]


def stacked_covariance(covariances: Sequence[MeanSquare]) -> MeanSquare:
    """Return that of several layers of one kind and number of rows, as if they were groups of one layer."""
    first, *others = covariances
    if not others:
        return first
    parts = zip(*(covariance.statistics for covariance in covariances), strict=True)
    return first.with_statistics([*map(torch.cat, parts)], first.rows)


def decayed(statistics: Iterable[Tensor], sums: Iterable[Tensor], decay: float) -> list[Tensor]:
    """Return sums with older ones, times decay, added to them."""
    return [new.add(old.to(new), alpha=decay) if decay else new for new, old in zip(sums, statistics, strict=True)]
