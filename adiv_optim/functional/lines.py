"""Sums over the patches of a convolution: of patches that are unfolded whole, or by lines, whichever costs less.

By lines they are unfolded along every axis of the kernel but the first. Along that one a patch is a few lines of the
image, and the product of lines d apart serves all pairs of lines that are d apart in the kernel: a 3×3 kernel of stride
1 takes three products of lines, not nine, and a third of the memory.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .linears import summed
from .patches import Geometry, Patches, gram_of, padded

#: Fixed cost of a pair of kernel positions, in multiplications: some 10 µs of one core.
_CALL = 2**19
#: Cost of reading an element for a product, or of writing an unfolded one.
_READ = 16
#: Cost of copying an element of a pair's product into XᵀX.
_WRITE = 32


def lines_pay(patches: Patches) -> bool:
    """Whether sums by lines cost less than of whole patches, in multiplications; calls and reads count."""
    (step, *_), _, (gap, *_), groups = patches.geometry
    size, count = patches.kernel[0], patches.out_spatial[0]
    width = patches.input.shape[1] // groups * math.prod(patches.kernel[1:])  # of a line
    rows = groups * len(patches.input) * patches.positions
    features, pairs = width * size, size * (size + 1) // 2  # pairs of places
    # Pairs that are equally far apart share the product of the lines between the edges; the edges are multiplied too.
    shared = step == 1 and 0 < gap * (size - 1) <= count
    products = size + gap * pairs / count if shared else pairs
    parts = -(-len(patches.input) // patches.samples_at_once(patches.input.dtype, axis=1))
    by_lines = parts * pairs * _CALL + products * rows * width * (width + _READ) + _WRITE * groups * features**2
    return by_lines < rows * features * (features + _READ)


def sums_over_patches(patches: Patches, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return XᵀX and Xᵀ1 of all patches, laid out as weights: (groups, features, features), (groups, features, 1)."""
    if lines_pay(patches):
        return sums_by_lines(patches, dtype)
    unfolded = (part.unfold() for part in patches.slices(dtype))
    sums = summed({"pairs": gram_of([x], [x]), "totals": x.sum(1)[..., None]} for x in unfolded)
    return sums["pairs"], sums["totals"]


def sums_by_lines(patches: Patches, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sums of `sums_over_patches` by lines."""
    size, groups = patches.kernel[0], patches.geometry.groups
    channels, across = patches.input.shape[1] // groups, math.prod(patches.kernel[1:])
    sums = summed(Lines(each).sums() for each in patches.slices(dtype, axis=1))
    gram = sums["pairs"].new_empty(groups, channels, size, across, channels, size, across)
    places = [(place, place + distance) for distance in range(size) for place in range(size - distance)]
    for (first, second), pair in zip(places, sums["pairs"], strict=True):
        block = pair.view(groups, channels, across, channels, across)
        gram[:, :, first, :, :, second] = block
        if first != second:
            gram[:, :, second, :, :, first] = block.permute(0, 3, 4, 1, 2)
    totals = sums["totals"].unflatten(2, (channels, -1)).movedim(0, 2)
    return gram.flatten(4).flatten(1, 3), totals.flatten(1)[..., None]


class Lines:
    """The patches X of a few samples. The places are those of the kernel's first axis, each of which reads a line."""

    def __init__(self, patches: Patches) -> None:
        (self.step, *steps), (side, *sides), (self.gap, *gaps), groups = patches.geometry
        self.size, *across = patches.kernel
        # `unfold` takes a line for a sample, and the samples are an axis along which the kernel has one place.
        input = padded(patches.input, [side, *(0 for _ in sides)]).transpose(0, 2)
        each = Patches(input, [1, *across], Geometry([1, *steps], [0, *sides], [1, *gaps], groups))
        #: (groups, lines, samples × other positions, channels × other axes of the kernel).
        self.lines = each.unfold().unflatten(1, (len(input), -1))
        self.count = (len(input) - self.gap * (self.size - 1) - 1) // self.step + 1

    def sums(self) -> dict[str, Tensor]:
        """Return the products of each two places, (pairs, groups, …), near ones first; and Xᵀ1 of each place."""
        totals = self.lines.sum(2, keepdim=True)
        return {
            "pairs": torch.stack([each for distance in range(self.size) for each in self._apart(distance)]),
            "totals": torch.stack([self._read(totals, place).sum(1) for place in range(self.size)]),
        }

    def _read(self, lines: Tensor, place: int) -> Tensor:
        """Return the lines that a place reads in all patches: (groups, rows, features of a line)."""
        start = place * self.gap
        return lines[:, start : start + self.step * (self.count - 1) + 1 : self.step].flatten(1, 2)

    def _apart(self, distance: int) -> Iterator[Tensor]:
        """Return the products of every place with the one so many places further."""
        further = self.size - 1 - distance
        edge = self.gap * further
        if self.step > 1 or self.count < edge:
            for place in range(further + 1):
                yield gram_of([self._read(self.lines, place)], [self._read(self.lines, place + distance)])
            return
        # All places read the lines between the edges; a place further on, fewer before them and more behind.
        inside = self._product(distance, edge, self.count, 1)[:, 0]
        if not further:
            yield inside
            return
        before = self._product(distance, 0, edge, further)
        behind = self._product(distance, self.count, self.count + edge, further)
        for place in range(further + 1):
            yield inside + before[:, place:].sum(1) + behind[:, :place].sum(1)

    def _product(self, distance: int, start: int, stop: int, pieces: int) -> Tensor:
        """Multiply these lines, in so many pieces, with those so many places further: (groups, pieces, …)."""
        left, right = (
            self.lines[:, first : first + stop - start].unflatten(1, (pieces, -1)).flatten(2, 3)
            for first in (start, start + self.gap * distance)
        )
        return gram_of([left], [right])
