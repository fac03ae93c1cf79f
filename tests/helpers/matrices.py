"""Matrices to be scaled, and how far a scaling is from what defines it."""

import torch
from torch import Tensor

MEANS = 1e-12

RECONSTRUCTION = 1e-14  # a dozen roundings of 1.1e-16

# log W' is an orthogonal projection of log W, so rounding of log W (here |log W| < 50, 1e-14) is not magnified; that of
# row and column sums is, by at most gap^(-1/2), under 100 for every support below.
INVARIANCE = 1e-12


def sparse(*shape: int, density: float = 0.5) -> Tensor:
    return torch.randn(shape) * (torch.rand(shape) < density)


def bidiagonal(n: int) -> Tensor:
    return torch.diag(torch.randn(n)) + torch.diag(torch.randn(n - 1), 1)


def zero_lines() -> Tensor:
    weight = torch.randn(5, 6)
    weight[2] = 0
    weight[:, [0, 4]] = 0
    return weight


#: Three components, the second a single entry, with their rows and columns interleaved.
def disconnected() -> Tensor:
    weight = torch.block_diag(torch.randn(3, 4), torch.randn(1, 1), sparse(4, 3) + torch.eye(4, 3))
    return weight[torch.randperm(8)][:, torch.randperm(8)]


MATRICES = {
    "square": lambda: torch.randn(5, 5),
    "wide": lambda: torch.randn(3, 8),
    "tall": lambda: torch.randn(8, 3),
    "number": lambda: torch.randn(1, 1),
    "uneven": lambda: torch.randn(7, 6) ** 9,
    "sparse-wide": lambda: sparse(6, 11),
    "sparse-tall": lambda: sparse(11, 6),
    "diagonal": lambda: torch.diag(torch.randn(6)),
    "bidiagonal-60": lambda: bidiagonal(60),
    "disconnected": disconnected,
    "zero-lines": zero_lines,
    "all-zero": lambda: torch.zeros(3, 4),
    "batch": lambda: torch.randn(2, 3, 4, 5),
    "batch-some-sparse": lambda: torch.stack(
        [torch.randn(5, 4), sparse(5, 4), torch.zeros(5, 4), torch.randn(5, 4), torch.eye(5, 4)]
    ),
    "complex": lambda: torch.randn(4, 5, dtype=torch.complex128),
    "complex-sparse": lambda: torch.randn(4, 5, dtype=torch.complex128) * (sparse(4, 5) != 0),
    "transposed-sparse": lambda: sparse(3, 4, 5).permute(2, 0, 1),
}

#: One of every code path: a closed form or a solve, by rows or by columns, with lines of zeros, with several members.
SOME = ["wide", "sparse-wide", "sparse-tall", "disconnected", "zero-lines", "batch-some-sparse", "complex-sparse"]


def deviation_of_means(canonical: Tensor, kernel_dims: int = 0) -> float:
    """Greatest |log| of a geometric mean of the non-zero entries of a row or column."""
    support = canonical != 0
    logs = torch.where(support, canonical.abs(), 1.0).log()
    places = tuple(range(-kernel_dims, 0))
    means = [
        logs.sum((dim - kernel_dims, *places)) / support.sum((dim - kernel_dims, *places)).clamp(min=1)
        for dim in (-1, -2)
    ]
    return max(mean.abs().max().item() for mean in means)


def largest_ratio(found: Tensor, wanted: Tensor) -> float:
    """Greatest relative deviation of an entry; zeros must be where they were."""
    assert torch.equal(found == 0, wanted == 0)
    return ((found - wanted).abs() / wanted.abs().clamp(min=1e-300)).max().item()


def scaled(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return rows[..., :, None] * weight * columns[..., None, :]


def units(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Random scales over some ten orders of magnitude."""
    return (4 * torch.randn(weight.shape[:-1])).exp(), (4 * torch.randn(*weight.shape[:-2], weight.shape[-1])).exp()
