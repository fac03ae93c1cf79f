"""Strips of symmetric matrices, and inverse roots: whole, or as c times the identity plus a matrix of low rank.

XᵀX is symmetric: strips of rows from the diagonal on are little more than half of it.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import _device

#: Up to this condition number float32 gives a root that is good to three digits, at half the price.
_MODERATE = 1e4

#: The error of products of float32 numbers where torch.set_float32_matmul_precision lets a GPU round them.
_TF32 = 2**-11

#: How many rows are one strip.
STRIP = 64


def strips_of(size: int) -> list[tuple[int, int]]:
    """Return first and last row of the strips of a matrix, nearly equal."""
    count = max(1, size // STRIP)
    return list(pairwise(size * k // count for k in range(count + 1)))


def joined(strips: Iterable[Tensor]) -> Tensor:
    """Return the symmetric matrix of strips, each of shape (…, rows, columns from the diagonal on)."""
    first, *others = strips
    matrix = first.new_empty(*first.shape[:-2], first.shape[-1], first.shape[-1])
    start = 0
    for strip in (first, *others):
        end = start + strip.shape[-2]
        matrix[..., start:end, start:] = strip
        matrix[..., start:, start:end] = strip.mT
        start = end
    return matrix


class NoRootError(ArithmeticError):
    """A matrix that could not be factorised, in float64 either."""


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of a symmetric matrix; a NoRootError where float64 has none, as with NaN.

    LAPACK's float32 eigh fails to converge on some matrices with many eigenvalues in one place, such as the covariance
    of inputs that are mostly zero. A multiple of the identity on top, far above rounding, prevents most of it.
    """
    for work in (matrix,) if matrix.dtype == torch.float64 else (matrix, None):
        try:
            values, vectors = torch.linalg.eigh(_device.to_float64(matrix) if work is None else work)
        except torch.linalg.LinAlgError:
            continue
        except RuntimeError as error:
            if not str(error).startswith("cusolver error"):  # few errors of cuSOLVER are LinAlgErrors
                raise
            continue
        if all(_device.read(_finite(values), _finite(vectors))):
            return values.to(matrix), vectors.to(matrix)
    raise NoRootError(f"no eigenvalues found of a matrix of shape {tuple(matrix.shape)}")


def _finite(tensor: Tensor) -> Tensor:
    """Whether all numbers are finite, which their sum tells in one pass where they are far from the greatest."""
    return tensor.sum().isfinite()


def inverse_root(matrix: Tensor, ridge: Tensor, condition: float = 1e6) -> Tensor:
    r"""Return :math:`(A + \lambda I)^{-1/2}` of A, (…, d, d), in float32 or float64, and λ > 0, (…); or a NoRootError.

    By eigenvalues; in float64 where `condition`, an upper bound of the condition number of A + λI, is large, or columns
    are far apart in scale. A column that is 0 off A's diagonal, as of an
    input that is always 0, is exactly so in the root: rounding there would make a gradient where there is none.
    """
    variances = matrix.diagonal(dim1=-2, dim2=-1)
    least = torch.where(variances > 0, variances, torch.inf).amin(-1)
    precise = condition > _MODERATE or any(_device.read((variances.amax(-1) > _MODERATE * least).any()))
    # Entries near 1: squares of large inputs would leave float32's range on the way.
    level = variances.mean(-1) + ridge
    shifted = _device.to_float64(matrix) if precise else matrix
    shifted = shifted / level[..., None, None].to(shifted.device)
    shifted.diagonal(dim1=-2, dim2=-1).add_((ridge / level)[..., None].to(shifted.device))
    values, vectors = eigh(shifted)
    half = vectors.div_(values.clamp_min((ridge / level)[..., None].to(values)).pow(0.25)[..., None, :])
    product = joined(half[..., a:b, :] @ half[..., a:, :].mT for a, b in strips_of(half.shape[-2]))
    inverse = product.div_(level[..., None, None].to(product).sqrt()).to(matrix)
    if not all(_device.read(_finite(inverse))):
        raise NoRootError(f"no finite root found of a matrix of shape {tuple(matrix.shape)}")
    alone = (matrix != 0).sum(-1) == (variances != 0)
    inverse.masked_fill_(alone[..., None] | alone[..., None, :], 0.0)
    inverse.diagonal(dim1=-2, dim2=-1).copy_(
        torch.where(alone, (variances + ridge[..., None]).rsqrt(), inverse.diagonal(dim1=-2, dim2=-1))
    )
    return inverse


def subspace_iteration(sketch: Tensor, basis: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the eigenvalues and eigenvectors of A as far as S = AU tells; the columns of U are orthonormal.

    .. math:: A \approx S (U^\top S)^{-1} S^\top = U' \Lambda U'^\top

    (Nyström's; Tropp, Yurtsever, Udell & Cevher 2017, arXiv 1706.05736). It is at most A, A itself if that has no more
    eigenvalues than U has columns, and U' is orth(AU), a step of subspace iteration: called again with AU', it follows
    an A that drifts from call to call. `level` is the mean eigenvalue of A. Raises as `eigh` does.
    """
    level = torch.where(level > 0, level, 1.0)[..., None, None]
    sketch = sketch / level
    inner = basis.mT @ sketch
    # The shift damps directions that rounding may have made.
    identity = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    factor = torch.full_like(inner, torch.nan)
    for rounding in (_TF32, torch.finfo(inner.dtype).eps):
        small = 10 * rounding * (1 + inner.diagonal(dim1=-2, dim2=-1).sum(-1))
        triangle, failed = torch.linalg.cholesky_ex((inner + inner.mT) / 2 + small[..., None, None] * identity)
        factor = torch.where((failed == 0)[..., None, None], triangle, factor)
    orthonormal, rest = torch.linalg.qr(sketch)
    half = torch.linalg.solve_triangular(factor, rest.mT, upper=False)
    # Shifted by the mean eigenvalue, for `eigh`: small eigenvalues lose digits by it, which large ones do not need.
    values, rotation = eigh(half.mT @ half + identity)
    values = values - 1
    some = (values > 10 * torch.finfo(values.dtype).eps * values[..., -1:].clamp_min(1.0))[..., None, :]
    # Rounding is no eigenvalue. And a column of A that is 0 is so in the eigenvectors of all others.
    vectors = (orthonormal @ rotation).masked_fill_(some & (sketch == 0).all(-1, keepdim=True), 0.0)
    return torch.where(some[..., 0, :], values, 0.0) * level[..., 0], vectors


class Whole:
    """A symmetric matrix M itself, shape (…, d, d)."""

    def __init__(self, matrix: Tensor) -> None:
        # In one layout wherever it comes from: in another one products round otherwise, and runs resume inexactly.
        self.matrix = matrix.contiguous()
        #: Its rows that go with W and the one of b, in columns likewise.
        ends = slice(-1), slice(-1, None)
        self.parts = [[self.matrix[..., rows, columns] for columns in ends] for rows in ends]

    def right_multiply(self, parts: Sequence[Tensor], overwrite: bool = False) -> list[Tensor]:
        """Return W M of one part, or the columns of [W, b] M of two, those of W and that of b; of +0 it is +0.

        They come and go by themselves: joining them would copy W. The result may `overwrite` them.
        """
        weight = parts[0]
        if weight.dtype != self.matrix.dtype or weight.device != self.matrix.device:  # the model has been converted
            return Whole(self.matrix.to(weight)).right_multiply(parts)
        multiply = torch.mm if weight.dim() == 2 else torch.bmm  # `@` takes as long again to choose between them
        if len(parts) == 1:
            return [multiply(weight, self.matrix)]
        bias, ((inside, column), (row, corner)) = parts[1], self.parts
        return [multiply(weight, inside).addcmul_(bias, row), multiply(weight, column).addcmul_(bias, corner)]

    @cached_property
    def inverse(self) -> "Whole":
        """M⁻¹, of an M that is a root and so not ill-conditioned in float64."""
        return Whole(torch.linalg.inv_ex(_device.to_float64(self.matrix)).inverse.to(self.matrix))


class LowRank:
    """M = c I + U diag(s) Uᵀ, c being `level`, of shape (…), or a number, which costs no further pass."""

    def __init__(self, level: float | Tensor, vectors: Tensor, weights: Tensor) -> None:
        self.level, self.vectors, self.weights = level, vectors, weights
        scaled = vectors * weights[..., None, :]
        #: Uᵀ and U diag(s), all rows of U, those of W, and that of b.
        self.rows = [(vectors[..., r, :].mT, scaled[..., r, :]) for r in (slice(None), slice(-1), slice(-1, None))]

    def right_multiply(self, parts: Sequence[Tensor], overwrite: bool = False) -> list[Tensor]:
        """Return [W, b] M; see `Whole`."""
        weight = parts[0]
        if weight.dtype != self.vectors.dtype or weight.device != self.vectors.device:  # the model has been converted
            level = self.level.to(weight) if isinstance(self.level, Tensor) else self.level
            return LowRank(level, self.vectors.to(weight), self.weights.to(weight)).right_multiply(parts, overwrite)
        (every, every_scaled), (ours, scaled), (last, last_scaled) = self.rows
        if len(parts) == 1:
            return [self._outside(weight, weight @ every_scaled, every, overwrite)]
        bias = parts[1]
        inside = (weight @ scaled).addcmul_(bias, last_scaled)
        return [self._outside(weight, inside, ours, overwrite), self._outside(bias, inside, last, overwrite)]

    def _outside(self, part: Tensor, inside: Tensor, vectors: Tensor, overwrite: bool) -> Tensor:
        out = part if overwrite else None
        if isinstance(self.level, float):
            multiply = torch.addmm if part.dim() == 2 else torch.baddbmm
            return multiply(part, inside, vectors, beta=self.level, out=out)
        return torch.mul(part, self.level[..., None, None], out=out).baddbmm_(inside, vectors)

    @cached_property
    def inverse(self) -> "LowRank":
        """M⁻¹."""
        level = self.level[..., None] if isinstance(self.level, Tensor) else self.level
        return LowRank(1 / self.level, self.vectors, 1 / (level + self.weights) - 1 / level)


class Scales:
    """A diagonal M, for one parameter: positive factors d, e, … that broadcast to a view of it and multiply it.

    Args:
        factors: numbers or tensors; of a sharded parameter about the part of this process.
        shape: of the view; None is the parameter's own.
    """

    def __init__(self, factors: Sequence[float | Tensor], shape: tuple[int, ...] | None = None) -> None:
        self.factors, self.shape = factors, shape

    @property
    def divisor(self) -> float:
        """Of a single number, by how much it divides."""
        (factor,) = self.factors
        return 1 / float(factor)

    def right_multiply(self, parts: Sequence[Tensor], overwrite: bool = False) -> list[Tensor]:
        """Return w d e … of the one part w."""
        (weight,) = parts
        product = weight.view(self.shape or weight.shape)
        for place, factor in enumerate(self.factors):
            product = product.mul_(factor) if overwrite or place else product * factor
        return [product.view(weight.shape)]

    @cached_property
    def inverse(self) -> "Scales":
        """M⁻¹."""
        return Scales([1 / factor for factor in self.factors], self.shape)


#: A matrix that [W, b] is multiplied with from the right.
RightFactor = Whole | LowRank | Scales


def stacked(factors: Sequence[Any]) -> Any:
    """Return the factors of several layers of one kind and shape, each (groups, d, d), as that of a stack of layers."""
    if isinstance(factors[0], Whole):
        return Whole(torch.cat([factor.matrix for factor in factors]))
    levels = [torch.as_tensor(factor.level).to(factor.weights).view(-1) for factor in factors]
    vectors, weights = (torch.cat([getattr(factor, name) for factor in factors]) for name in ("vectors", "weights"))
    return LowRank(torch.cat(levels), vectors, weights)


def low_rank_inverse_root(trace: Tensor, values: Tensor, vectors: Tensor, ridge: Tensor) -> LowRank:
    r"""Return the inverse root of A + λI where all but A's leading eigenvalues are taken to be τ, their mean.

    .. math:: (A + \lambda I)^{-1/2} \approx (\tau + \lambda)^{-1/2} I
              + U \left( (\Lambda + \lambda)^{-1/2} - (\tau + \lambda)^{-1/2} \right) U^\top
    """
    size, rank = vectors.shape[-2:]
    level = (((trace - values.sum(-1)) / (size - rank)).clamp_min(0) + ridge).rsqrt()
    weights = (values.clamp_min(0) + ridge[..., None]).rsqrt() - level[..., None]
    weights = torch.where(values > 0, weights, 0.0)  # no eigenvectors: A has no more, and τ is 0
    finite, *first = _device.read((level.sum() + weights.sum()).isfinite(), level)
    if not finite:
        raise NoRootError(f"no finite root found of the {rank} leading eigenvectors of {size} columns")
    return LowRank(level if level.numel() > 1 else first[0], vectors, weights)
