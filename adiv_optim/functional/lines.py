"""Sums over the patches of a convolution, by whole patches or by lines of the image, whichever costs less.

By lines, patches are unfolded along every axis of the kernel but the first. A *tap* is a place of the kernel along that
axis, and reads one line of each patch. The product of lines d apart serves all pairs of taps that are d apart: a 3×3
kernel of stride 1 takes three products of lines, not nine, and a third of the memory.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .linears import summed
from .patches import Geometry, Patches, cross_gram
from .shared import padded

#: Costs, in multiplications. The fixed cost of a pair of taps: some 10 µs of one core.
_PAIR_COST = 2**19
#: The cost of reading a number for a product, or of writing an unfolded one.
_READ_COST = 16
#: The cost of copying a number from a pair's product into XᵀX.
_COPY_COST = 32


def is_cheaper_by_lines(patches: Patches) -> bool:
    """Whether sums by lines cost less than sums by whole patches."""
    (step, *_), _, (gap, *_), groups = patches.geometry
    taps, count = patches.kernel[0], patches.out_spatial[0]
    width = patches.input.shape[1] // groups * math.prod(patches.kernel[1:])  # of a line
    rows = groups * len(patches.input) * patches.positions
    features, pairs = width * taps, taps * (taps + 1) // 2
    # Pairs that are equally far apart share the product of the lines between the edges; the edges are multiplied too.
    is_shared = step == 1 and 0 < gap * (taps - 1) <= count
    products = taps + gap * pairs / count if is_shared else pairs
    calls = pairs * -(-len(patches.input) // patches.samples_at_once(patches.input.dtype, axis=1))
    multiplied = products * rows * width * (width + _READ_COST)
    by_lines = calls * _PAIR_COST + multiplied + _COPY_COST * groups * features**2
    return by_lines < rows * features * (features + _READ_COST)


def sums_over_patches(patches: Patches, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return XᵀX and Xᵀ1 of all patches, laid out as weights: (groups, features, features), (groups, features, 1)."""
    if is_cheaper_by_lines(patches):
        return sums_by_lines(patches, dtype)
    unfolded = (part.unfold() for part in patches.slices(dtype))
    sums = summed({"gram": cross_gram([x], [x]), "totals": x.sum(1)[..., None]} for x in unfolded)
    return sums["gram"], sums["totals"]


def sums_by_lines(patches: Patches, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sums of `sums_over_patches` by lines."""
    taps, groups = patches.kernel[0], patches.geometry.groups
    channels, across = patches.input.shape[1] // groups, math.prod(patches.kernel[1:])
    products = summed(Lines(part).products() for part in patches.slices(dtype, axis=1))
    totals = products.pop("totals").unflatten(2, (channels, -1)).movedim(0, 2)
    gram = totals.new_empty(groups, channels, taps, across, channels, taps, across)
    for (first, second), product in products.items():
        block = product.view(groups, channels, across, channels, across)
        gram[:, :, first, :, :, second] = block
        if first != second:
            gram[:, :, second, :, :, first] = block.permute(0, 3, 4, 1, 2)
    return gram.flatten(4).flatten(1, 3), totals.flatten(1)[..., None]


class Lines:
    """The patches X of a few samples, as lines."""

    def __init__(self, patches: Patches) -> None:
        (self.step, *steps), (side, *sides), (self.gap, *gaps), groups = patches.geometry
        self.taps, *across = patches.kernel
        # `unfold` takes a line for a sample, and the samples for an axis along which the kernel has size 1.
        input = padded(patches.input, [side, *(0 for _ in sides)]).transpose(0, 2)
        lines = Patches(input, [1, *across], Geometry([1, *steps], [0, *sides], [1, *gaps], groups))
        #: (groups, lines, samples × other positions, channels × other axes of the kernel).
        self.lines = lines.unfold().unflatten(1, (len(input), -1))
        #: How many patches there are along the first axis.
        self.count = (len(input) - self.gap * (self.taps - 1) - 1) // self.step + 1

    def products(self) -> dict[Any, Tensor]:
        """Return the product of each two taps, by their numbers, and as "totals" Xᵀ1 of all taps, (taps, groups, …)."""
        line_totals = self.lines.sum(2, keepdim=True)
        totals = torch.stack([self._read(line_totals, tap).sum(1) for tap in range(self.taps)])
        apart = [enumerate(self._apart(distance)) for distance in range(self.taps)]
        products = {(tap, tap + distance): part for distance, parts in enumerate(apart) for tap, part in parts}
        return {"totals": totals, **products}

    def _read(self, lines: Tensor, tap: int) -> Tensor:
        """Return the lines that a tap reads in all patches: (groups, rows, features of a line)."""
        start = tap * self.gap
        return lines[:, start : start + self.step * (self.count - 1) + 1 : self.step].flatten(1, 2)

    def _apart(self, distance: int) -> Iterator[Tensor]:
        """Yield the product of every tap with the one at this distance behind it."""
        last = self.taps - 1 - distance
        edge = self.gap * last
        if not last or self.step > 1 or self.count < edge:
            for tap in range(last + 1):
                yield cross_gram([self._read(self.lines, tap)], [self._read(self.lines, tap + distance)])
            return
        # All taps read the lines between the edges; each next one reads fewer before them and more behind.
        inside = self._product(distance, edge, self.count, 1)[:, 0]
        before = self._product(distance, 0, edge, last)
        behind = self._product(distance, self.count, self.count + edge, last)
        for tap in range(last + 1):
            yield inside + before[:, tap:].sum(1) + behind[:, :tap].sum(1)

    def _product(self, distance: int, start: int, stop: int, pieces: int) -> Tensor:
        """Multiply lines `start` to `stop`, in pieces, with those `distance` taps further: (groups, pieces, …)."""
        left, right = (
            self.lines[:, first : first + stop - start].unflatten(1, (pieces, -1)).flatten(2, 3)
            for first in (start, start + self.gap * distance)
        )
        return cross_gram([left], [right])
