"""Covariances of low rank, and their inverse roots: c times the identity plus a matrix of low rank."""

from collections.abc import Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError

from .. import _device
from ..functional.patches import cross_gram
from .covariance import Covariance, Sums, decayed
from .roots import RightFactor, eigh

#: The error of products of float32 numbers where torch.set_float32_matmul_precision lets a GPU round them.
_TF32 = 2**-11


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
    has_eigenvector = (values > 10 * torch.finfo(values.dtype).eps * values[..., -1:].clamp_min(1.0))[..., None, :]
    # Rounding is no eigenvalue. And a column of A that is 0 is so in the eigenvectors of all others.
    vectors = (orthonormal @ rotation).masked_fill_(has_eigenvector & (sketch == 0).all(-1, keepdim=True), 0.0)
    return torch.where(has_eigenvector[..., 0, :], values, 0.0) * level[..., 0], vectors


class LowRank(RightFactor):
    """M = c I + U diag(s) Uᵀ, c being `level`, of shape (…), or a number, which costs no further pass."""

    def __init__(self, level: float | Tensor, vectors: Tensor, weights: Tensor) -> None:
        self.level, self.vectors, self.weights = level, vectors, weights

    @cached_property
    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Uᵀ and U diag(s): of all rows of U, of those of W, and of that of b."""
        u, scaled = self.vectors, self.vectors * self.weights[..., None, :]
        return [(u[..., rows, :].mT, scaled[..., rows, :]) for rows in (slice(None), slice(-1), slice(-1, None))]

    @property
    def tensors(self) -> list[Tensor]:
        """Return c of each matrix, U and s."""
        return [torch.as_tensor(self.level).to(self.weights).expand(len(self.weights)), self.vectors, self.weights]

    def right_multiply(self, parts: Sequence[Tensor], overwrite: bool = False) -> list[Tensor]:
        weight = parts[0]
        if weight.dtype != self.vectors.dtype or weight.device != self.vectors.device:  # the model has been converted
            return LowRank(*(tensor.to(weight) for tensor in self.tensors)).right_multiply(parts, overwrite)
        (every, every_scaled), (of_weight, scaled), (of_bias, last_scaled) = self.parts
        if len(parts) == 1:
            return [self._outside(weight, weight @ every_scaled, every, overwrite)]
        bias = parts[1]
        inside = (weight @ scaled).addcmul_(bias, last_scaled)
        return [self._outside(weight, inside, of_weight, overwrite), self._outside(bias, inside, of_bias, overwrite)]

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


def low_rank_inverse_root(trace: Tensor, values: Tensor, vectors: Tensor, ridge: Tensor) -> LowRank:
    r"""Return the inverse root of A + λI where all but A's leading eigenvalues are taken to be τ, their mean.

    .. math:: (A + \lambda I)^{-1/2} \approx (\tau + \lambda)^{-1/2} I
              + U \left( (\Lambda + \lambda)^{-1/2} - (\tau + \lambda)^{-1/2} \right) U^\top
    """
    size, rank = vectors.shape[-2:]
    level = (((trace - values.sum(-1)) / (size - rank)).clamp_min(0) + ridge).rsqrt()
    weights = (values.clamp_min(0) + ridge[..., None]).rsqrt() - level[..., None]
    weights = torch.where(values > 0, weights, 0.0)  # columns beyond the rank of A, where τ is 0
    finite, *first = _device.read((level.sum() + weights.sum()).isfinite(), level)
    if not finite:
        raise LinAlgError(f"no finite root found of the {rank} leading eigenvectors of {size} columns")
    return LowRank(level if level.numel() > 1 else first[0], vectors, weights)


class LowRankCovariance(Covariance):
    r"""The leading eigenvectors U of A and their eigenvalues Λ, by one step of subspace iteration a measurement.

    .. math:: S = \tilde X^\top (\tilde X U) + \mathrm{decay} \cdot U \Lambda, \qquad
              U' \Lambda' U'^\top \approx S (U^\top S)^{-1} S^\top

    and A's trace is kept beside them: 2 n d rank multiplications for n rows, and 2 d rank numbers, where A takes n d²
    and d². The part of earlier rows outside of U counts in the trace alone. Remembered of a block are U, UΛ and the
    trace; sums are those of S and of the trace. `rank` of each block is less than it has columns; for the other
    arguments see `Covariance`.
    """

    depends_on_statistics = True

    def __init__(self, module: nn.Module, with_bias: bool, max_dim: int | None, rank: int) -> None:
        self.rank = rank
        super().__init__(module, with_bias, max_dim)

    def __str__(self) -> str:
        return f"rank {self.rank} of {super().__str__()}"

    @property
    def _bases(self) -> list[Tensor]:
        return self.statistics[::3]

    @property
    def _sketches(self) -> list[Tensor]:
        return self.statistics[1::3]

    def traces(self) -> list[Tensor]:
        return self.statistics[2::3]

    def _zeros(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return U of orthonormal columns drawn by chance, the same on all processes, and zeros."""
        statistics: list[Tensor] = []
        for size in self.sizes:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(size, self.rank, generator=generator, dtype=torch.float64, device="cpu")
            basis = torch.linalg.qr(drawn).Q.to(device, dtype).repeat(self.groups, 1, 1)
            statistics += [basis, torch.zeros_like(basis), basis.new_zeros(self.groups)]
        return statistics

    def no_sums(self) -> Sums:
        pairs = zip(self._sketches, self.traces(), strict=True)
        return Sums([torch.zeros_like(tensor) for pair in pairs for tensor in pair], 0)

    def _products(self, rows: Tensor, bias_entry: int) -> list[Tensor]:
        sums: list[Tensor] = []
        for number, (block, basis) in enumerate(zip(self.blocks, self._bases, strict=True)):
            x, u = rows[..., block], basis.to(rows)
            inside, square = x @ u[..., : x.shape[-1], :], torch.linalg.vector_norm(x, dim=(-2, -1)).square()
            if has_bias := self.with_bias and number == len(self.blocks) - 1:
                inside += bias_entry * u[..., -1:, :]
                square += bias_entry * x.shape[-2]
            parts = [cross_gram([inside], [x]).mT, *[bias_entry * inside.sum(-2, keepdim=True)] * has_bias]
            sums += [torch.cat(parts, -2), square]
        return sums

    def updated(self, sums: Sums, decay: float) -> Self:
        before = [tensor for pair in zip(self._sketches, self.traces(), strict=True) for tensor in pair]
        new = decayed(before, sums.parts, decay)
        statistics: list[Tensor] = []
        for basis, sketch, trace in zip(self._bases, new[::2], new[1::2], strict=True):
            values, vectors = subspace_iteration(sketch, basis.to(sketch), trace / basis.shape[-2])
            statistics += [vectors, vectors * values[..., None, :], trace]
        return self.with_statistics(statistics, decay * self.rows + sums.rows)

    def _inverse_roots(self, scale: Tensor, ridge: Tensor, condition: float) -> list[LowRank]:
        roots = []
        for basis, sketch, trace in zip(self._bases, self._sketches, self.traces(), strict=True):
            # Not by the norm of UΛ: squares of large inputs' squares would leave float32's range.
            values = (basis * sketch).sum(-2) / self.rows
            roots.append(low_rank_inverse_root(trace / self.rows / scale, values / scale[..., None], basis, ridge))
        return roots


def covariance_of(module: nn.Module, with_bias: bool, *, max_dim: int | None, rank: int | None) -> Covariance:
    """Return the covariance of a layer, of low rank where that is less than each block has columns."""
    whole = Covariance(module, with_bias, max_dim)
    if rank is None or rank >= min(whole.sizes):
        return whole
    return LowRankCovariance(module, with_bias, max_dim, rank)
