"""The rows X that a weight multiplies, as patches: unfolding a few samples at a time, squared norms, products XᵀY."""

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .shared import squared_norm

#: The most numbers of unfolded patches at a time, but for a quarter of the input's or one sample's where that is more.
PATCH_NUMBERS = 2**19


def patch_squared_norm(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> Tensor:
    r"""Return |patch|² of every patch a convolution reads, by a box filter over channel-summed squares.

    :math:`|\mathrm{patch}_{n,g,p}|^2 = \sum_{o} \sum_{c \in g} x_{n,c,sp+do}^2` over kernel offsets o (Bird 2025,
    Appendix B.2). The box is separable and every term is a square, so the result is summed axis by axis
    (`box_sum`): no unfolded copy, no cancellation, never below zero, as a convolution with ones by FFT or
    Winograd could be.

    Args:
        input: shape (N, C, *spatial).
        kernel_size: one integer per spatial dimension; so are stride, padding (of zeros) and dilation.
        stride: see torch's convolutions.
        padding: see torch's convolutions.
        dilation: see torch's convolutions.
        groups: C is split into this many groups, each with patches of its own.

    Returns:
        Shape (N, groups, *out_spatial); float32, or float64 for a float64 input.

    Example:
        >>> import torch
        >>> patch_squared_norm(torch.ones(1, 2, 4), [3], [1], [1], [1])
        tensor([[[4., 6., 6., 4.]]])
    """
    norm = padded(squared_norm(input.unflatten(1, (groups, -1)), 2), padding)
    return box_sum(norm, kernel_size, stride, dilation)


def box_sum(tensor: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    r"""Sum over the window of every position of the trailing dimensions, axis by axis: :math:`y_p = \sum_o x_{sp+do}`.

    Args:
        tensor: shape (…, *spatial).
        kernel_size: one integer per spatial dimension, o runs below it; so are stride s and dilation d.
        stride: see torch's convolutions.
        dilation: see torch's convolutions.

    Returns:
        Shape (…, *out_spatial); empty where a window does not fit.

    Example:
        >>> import torch
        >>> box_sum(torch.arange(5.0), [2], [1], [3])
        tensor([3., 5.])
    """
    for dim, (size, step, gap) in enumerate(zip(kernel_size, stride, dilation, strict=True), start=-len(kernel_size)):
        reach = tensor.shape[dim] - gap * (size - 1)
        # Indexed in place: with the axis moved to the end, the gradient would be laid out across the image.
        behind = (slice(None),) * (-1 - dim)
        windows: list[Any] = [(..., slice(start, start + reach, step), *behind) for start in range(0, gap * size, gap)]
        tensor = reduce(torch.add, [tensor[window] for window in windows])
    return tensor


def padded(tensor: Tensor, padding: Sequence[int]) -> Tensor:
    """Pad both ends of the trailing dimensions with zeros; without any padding return the tensor itself."""
    sides = [side for size in reversed(padding) for side in (size, size)]
    return F.pad(tensor, sides) if any(sides) else tensor


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
        """Return |x_p|² of every patch, (N, groups, *positions)."""
        return patch_squared_norm(self.input, self.kernel, *self.geometry)

    def subsample(self, max_rows: int, step_index: int) -> "Patches":
        """Return the patches of some samples: at most `max_rows`, but those of one sample at least.

        One sample is taken from each of as many runs of the batch; its offset in the run differs, for even distances
        could take the same position of every sequence. Another step takes other samples.
        """
        count, total = max(1, max_rows // max(1, self.positions)), len(self.input)
        if count >= total:
            return self
        runs = torch.arange(count + 1, device=self.input.device)
        ends = runs * total // count
        # Multiples of the golden ratio, modulo 1.
        offset = ((runs[:-1] + step_index) * 2654435769 % 2**32 * ends.diff()) >> 32
        return self._replace(input=self.input[ends[:-1] + offset])

    def samples_at_once(self, dtype: torch.dtype, axis: int = 0) -> int:
        """Return how many samples are unfolded together; all if that copies nothing. For `axis` see `slices`."""
        if not self.kernel and self.input.dtype == dtype:
            return max(1, len(self.input))
        per_sample = math.prod(self.kernel[axis:]) * self.input[:1].numel() // math.prod(self.geometry.stride[axis:])
        return max(1, max(PATCH_NUMBERS, self.input.numel() // 4) // max(1, per_sample))

    def slices(self, dtype: torch.dtype, axis: int = 0) -> "Iterator[Patches]":
        """Yield the patches of a few samples at a time; of all at once if unfolding them copies nothing.

        `axis` is the first one along which they will be unfolded.
        """
        size = self.samples_at_once(dtype, axis)
        for start in range(0, len(self.input), size):
            yield self._replace(input=self.input[start : start + size].to(dtype))

    def unfold(self) -> Tensor:
        """Return every patch as a row, laid out as weights are: (groups, N × positions, C / groups × kernel)."""
        stride, padding, dilation, groups = self.geometry
        patches = padded(self.input, padding).unflatten(1, (groups, -1))
        for dim, (size, step, gap) in enumerate(zip(self.kernel, stride, dilation, strict=True), start=3):
            patches = patches.unfold(dim, gap * (size - 1) + 1, step)[..., ::gap]
        # (N, groups, channels, *positions, *kernel) → (groups, N, *positions, channels, *kernel)
        patches = patches.movedim(1, 0).movedim(2, 2 + len(self.kernel))
        return patches.flatten(2 + len(self.kernel)).flatten(1, -2)

    def at(self, index: Tensor) -> Tensor:
        """Return the patches whose numbers are in `index`, ascending: (groups, n, features)."""
        chosen, before = [], 0
        for rows in (patches.unfold() for patches in self.slices(self.input.dtype)):
            is_here = (index >= before) & (index < before + rows.shape[1])
            chosen.append(rows[:, index[is_here] - before])
            before += rows.shape[1]
        return torch.cat(chosen, 1)


def cross_gram(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Return [left]ᵀ[right] of blocks of columns, block by block: joining the blocks first would copy X."""
    return _side_by_side([_side_by_side([_transposed_product(a, b) for b in right], -1) for a in left], -2)


def _side_by_side(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]  # torch.cat copies a single one


def _transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ @ right, added up over runs of rows: one product may lose a unit of rounding for every row."""
    # The sums of the runs take a sixteenth of the larger argument at most.
    run = max(64, 16 * min(left.shape[-1], right.shape[-1]))
    runs = left.shape[-2] // run
    if runs < 2:
        return left.mT @ right
    whole = runs * run
    a, b = (tensor[..., :whole, :].unflatten(-2, (runs, run)) for tensor in (left, right))
    product = (a.mT @ b).sum(-3)
    return product + left[..., whole:, :].mT @ right[..., whole:, :] if whole < left.shape[-2] else product
