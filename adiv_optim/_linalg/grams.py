"""Products XᵀX of many rows; being symmetric, strips of rows from the diagonal on are little more than half of them."""

from collections.abc import Iterable
from itertools import pairwise

import torch
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


def gram_of(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """[left]ᵀ[right] of blocks of columns, block by block: joining the blocks first would copy X."""
    return _side_by_side([_side_by_side([_product(a, b) for b in right], -1) for a in left], -2)


def _side_by_side(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]  # torch.cat copies a single one


def _product(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ @ right, summed over runs of rows first: a product may lose as many units of rounding as there are rows."""
    # The sums of the runs take a sixteenth of the larger argument at most.
    run = max(64, 16 * min(left.shape[-1], right.shape[-1]))
    runs = left.shape[-2] // run
    if runs < 2:
        return left.mT @ right
    whole = runs * run
    a, b = (tensor[..., :whole, :].unflatten(-2, (runs, run)) for tensor in (left, right))
    product = (a.mT @ b).sum(-3)
    return product + left[..., whole:, :].mT @ right[..., whole:, :] if whole < left.shape[-2] else product
