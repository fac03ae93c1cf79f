"""Symmetric matrices, of which strips of rows from the diagonal on are little more than half."""

from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor

#: How many rows are one strip.
STRIP = 64


def strips_of(size: int) -> list[tuple[int, int]]:
    """First and last row of the strips of a matrix, nearly equal."""
    count = max(1, size // STRIP)
    return list(pairwise(size * k // count for k in range(count + 1)))


def joined(strips: Iterable[Tensor]) -> Tensor:
    """The symmetric matrix of strips, each of shape (…, rows, columns from the diagonal on)."""
    first, *others = strips
    matrix = first.new_empty(*first.shape[:-2], first.shape[-1], first.shape[-1])
    start = 0
    for strip in (first, *others):
        end = start + strip.shape[-2]
        matrix[..., start:end, start:] = strip
        matrix[..., start:, start:end] = strip.mT
        start = end
    return matrix
