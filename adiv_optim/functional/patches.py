"""The rows X that a layer's weight multiplies, as patches; products XᵀY; and the weight as matrices beside them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from .shared import box_sum, padded, squared_norm

#: At most so many numbers are unfolded at a time, or a quarter of the input, or one sample, where that is more.
PATCH_NUMBERS = 2**19


class Geometry(NamedTuple):
    """Stride, padding and dilation, each a number for every spatial dimension, and how many groups there are."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


class Patches(NamedTuple):
    """The rows that a weight multiplies. Those of a linear layer are patches whose kernel has no dimensions."""

    input: Tensor
    kernel: Sequence[int]
    geometry: Geometry

    @property
    def out_spatial(self) -> list[int]:
        """How many patches a sample has along each axis."""
        axes = zip(self.input.shape[2:], self.kernel, *self.geometry[:3], strict=True)
        return [(length + 2 * side - gap * (size - 1) - 1) // step + 1 for length, size, step, side, gap in axes]

    @property
    def positions(self) -> int:
        """How many patches a sample has."""
        return math.prod(self.out_spatial)

    def squared_norm(self) -> Tensor:
        """Return |x_p|² of every patch, (N, groups, *positions), in float32 at least (Bird 2025, Eq. 54)."""
        # Sums of squares without an unfolded copy: no cancellation, never below zero, as a convolution with ones by
        # FFT or Winograd could be.
        stride, padding, dilation, groups = self.geometry
        norm = squared_norm(self.input.unflatten(1, (groups, -1)), 2)
        return box_sum(padded(norm, padding), self.kernel, stride, dilation)

    def samples_at_once(self, dtype: torch.dtype, axis: int = 0) -> int:
        """Return how many samples are unfolded together; all if that copies nothing. For `axis` see `slices`."""
        if not self.kernel and self.input.dtype == dtype:
            return max(1, len(self.input))
        per_sample = math.prod(self.kernel[axis:]) * self.input[:1].numel() // math.prod(self.geometry.stride[axis:])
        return max(1, max(PATCH_NUMBERS, self.input.numel() // 4) // max(1, per_sample))

    def slices(self, dtype: torch.dtype, axis: int = 0) -> "Iterator[Patches]":
        """Yield the patches of some samples at a time, all if that copies nothing; `axis`: the first to be unfolded."""
        size = self.samples_at_once(dtype, axis)
        for start in range(0, len(self.input), size):
            yield self._replace(input=self.input[start : start + size].to(dtype))

    def unfold(self) -> Tensor:
        """Return every patch as a row, laid out as weights are: (groups, N × positions, C / groups × kernel)."""
        if not self.kernel:
            return self.input.unsqueeze(0)
        stride, padding, dilation, groups = self.geometry
        patches = padded(self.input, padding).unflatten(1, (groups, -1))
        for dim, (size, step, gap) in enumerate(zip(self.kernel, stride, dilation, strict=True), start=3):
            patches = patches.unfold(dim, gap * (size - 1) + 1, step)[..., ::gap]
        # (N, groups, channels, *positions, *kernel) → (groups, N, *positions, channels, *kernel)
        patches = patches.movedim(1, 0).movedim(2, 2 + len(self.kernel))
        return patches.flatten(2 + len(self.kernel)).flatten(1, -2)


def patches_of(layer: Any, input: Tensor) -> Patches:
    """Return the rows that a layer reads.

    A layer of any class may have a method `input_rows(input)`, which returns what its weight multiplies,
    (…, in_features).
    """
    if hasattr(layer, "input_rows"):
        input = layer.input_rows(input)
    if not isinstance(layer, _ConvNd):
        return Patches(row_matrix(input), (), Geometry((), (), (), 1))
    padding, kernel = layer.padding, layer.kernel_size
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = layer.padding_mode.replace("zeros", "constant")
        input, padding = F.pad(input, layer._reversed_padding_repeated_twice, mode=mode), (0,) * len(kernel)
    batch = input if input.dim() == len(kernel) + 2 else input.unsqueeze(0)
    return Patches(batch, kernel, Geometry(layer.stride, padding, layer.dilation, layer.groups))


def row_matrix(tensor: Tensor) -> Tensor:
    """Return a linear layer's rows as a matrix, whatever dimensions and layout the tensor has."""
    if tensor.is_nested:
        return torch.cat([row_matrix(part) for part in tensor.unbind()])
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])  # not -1: rows may have no entries


def as_matrices(part: Tensor, transposed: bool, groups: int, count: int = 1) -> Tensor:
    """Return a weight as (count × groups, outputs, features), a bias as (count × groups, outputs, 1).

    With a `count` above 1 dimension 0 stacks that many parameters. A view, where the memory allows one. For
    `transposed` and `groups` see `Layout`.
    """
    shape = part.shape[count > 1 :]
    if len(shape) == 2 and transposed:
        return part.mT if count > 1 else part.mT[None]
    return part.reshape(count * groups, shape[0] // groups, shape[1:].numel())


def from_matrices(matrices: Tensor, transposed: bool, shape: tuple[int, ...], count: int = 1) -> Tensor:
    """Return each part in its shape again: the inverse of `as_matrices`; the dtype stays."""
    if len(shape) == 2 and transposed:
        matrices = matrices.mT
    return matrices.reshape((count, *shape) if count > 1 else shape)


def cross_gram(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Return [left]ᵀ[right] of blocks of columns, block by block: joining the blocks first would copy X."""
    return _side_by_side([_side_by_side([_transposed_product(a, b) for b in right], -1) for a in left], -2)


def _side_by_side(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]  # torch.cat copies a single one


def _transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ @ right, added up over runs of rows: one product may lose a unit of rounding for every row."""
    # The sums of the runs take a sixteenth of the larger argument at most; a power of two divides most batches.
    run = max(64, 1 << (16 * min(left.shape[-1], right.shape[-1]) - 1).bit_length())
    runs = left.shape[-2] // run
    if runs < 2:
        return left.mT @ right
    whole = runs * run
    a, b = (tensor[..., :whole, :].unflatten(-2, (runs, run)) for tensor in (left, right))
    product = (a.mT @ b).sum(-3)
    return product + left[..., whole:, :].mT @ right[..., whole:, :] if whole < left.shape[-2] else product
