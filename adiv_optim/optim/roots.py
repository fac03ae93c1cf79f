"""Inverse roots of symmetric matrices, and the factors that weights, gradients and steps are multiplied by."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError

from .. import _device

#: Up to this condition number float32 gives a root that is good to three digits, at half the price.
_MODERATE = 1e4


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of a symmetric matrix; a LinAlgError where float64 has none, as with NaN.

    LAPACK's float32 eigh fails to converge on some matrices with many eigenvalues in one place, such as the covariance
    of inputs that are mostly zero. A multiple of the identity on top, far above rounding, prevents most of it.
    """
    for work in (matrix,) if matrix.dtype == torch.float64 else (matrix, None):
        try:
            values, vectors = torch.linalg.eigh(_device.to_float64(matrix) if work is None else work)
        except LinAlgError:
            continue
        except RuntimeError as error:
            if not str(error).startswith("cusolver error"):  # few errors of cuSOLVER are LinAlgErrors
                raise
            continue
        if all(map(math.isfinite, _device.read(values.sum(), vectors.sum()))):  # in one pass over each
            return values.to(matrix), vectors.to(matrix)
    raise LinAlgError(f"no eigenvalues found of a matrix of shape {tuple(matrix.shape)}")


def inverse_root(matrix: Tensor, ridge: Tensor, condition: float = 1e6) -> Tensor:
    r"""Return :math:`(A + \lambda I)^{-1/2}` of A, (…, d, d), in float32 or float64, and λ > 0, (…); or a LinAlgError.

    By eigenvalues; in float64 where `condition`, an upper bound of (trace of A) / λ + 1, is large, or columns are far
    apart in scale. Where neither is so, an accelerator takes `by_products`. A column that is 0 off A's diagonal, as of
    an input that is always 0, is exactly so in the root: rounding there would make a gradient where there is none.
    """
    variances = matrix.diagonal(dim1=-2, dim2=-1)
    least = torch.where(variances > 0, variances, torch.inf).amin(-1)
    precise = condition > _MODERATE or any(_device.read((variances.amax(-1) > _MODERATE * least).any()))
    # Entries near 1: squares of large inputs would leave float32's range on the way.
    level = variances.mean(-1) + ridge
    shifted = _device.to_float64(matrix) if precise else matrix
    shifted = shifted / level[..., None, None].to(shifted.device)
    shifted.diagonal(dim1=-2, dim2=-1).add_((ridge / level)[..., None].to(shifted.device))
    product = by_products(shifted, condition) if _device.on_accelerator(shifted) and not precise else None
    if product is None:
        values, vectors = eigh(shifted)
        half = vectors.div_(values.clamp_min((ridge / level)[..., None].to(values)).pow(0.25)[..., None, :])
        product = half @ half.mT
    inverse = product.div_(level[..., None, None].to(product).sqrt()).to(matrix)
    if not all(map(math.isfinite, _device.read(inverse.sum()))):
        raise LinAlgError(f"no finite root found of a matrix of shape {tuple(matrix.shape)}")
    is_diagonal = (matrix != 0).sum(-1) == (variances != 0)
    inverse.masked_fill_(is_diagonal[..., None] | is_diagonal[..., None, :], 0.0)
    inverse.diagonal(dim1=-2, dim2=-1).copy_(
        torch.where(is_diagonal, (variances + ridge[..., None]).rsqrt(), inverse.diagonal(dim1=-2, dim2=-1))
    )
    return inverse


def by_products(matrix: Tensor, condition: float) -> Tensor | None:
    r"""Return M^(-1/2) of symmetric M, (n, d, d), by products alone; or None where they have not come near it.

    .. math:: T = \tfrac12 (3 I - Z Y), \qquad Y \leftarrow Y T, \qquad Z \leftarrow T Z

    from Y = M / ‖M‖ and Z = I, which go to its root and the inverse of that (Higham 2008, Functions of Matrices, Eq.
    6.35). A GPU has 12 such steps behind it before cuSOLVER has tridiagonalised the matrix. `condition` is that of
    `inverse_root`; with d it says how many steps there are, for ‖M‖ is Frobenius's.
    """
    is_rounded = torch.backends.cuda.matmul.fp32_precision == "tf32"  # to ten bits; to ask allow_tf32 may raise
    work = _device.to_float64(matrix) if is_rounded else matrix
    identity = torch.eye(work.shape[-1], dtype=work.dtype, device=work.device).expand_as(work)
    norm = torch.linalg.matrix_norm(work, keepdim=True)
    root, inverse, least = work / norm, identity, (condition + work.shape[-1] ** 0.5) ** -0.5
    while least < 1 - torch.finfo(matrix.dtype).eps:
        step = torch.baddbmm(identity, inverse, root, beta=1.5, alpha=-0.5)
        root, inverse, least = root @ step, step @ inverse, least * (3 - least**2) / 2
    inverse = (inverse + inverse.mT) / 2
    (error,) = _device.read((inverse @ root - identity).abs().max())
    return (inverse / norm.sqrt()).to(matrix) if error < 1e-3 else None


class RightFactor:
    """A matrix M by which [W, b] is multiplied from the right, or one for each layer of a stack; or `Scales`."""

    #: M⁻¹, and what M is built from, each with a first dimension for the matrices of a stack.
    inverse: Any
    tensors: Any

    def right_multiply(self, parts: Sequence[Tensor], overwrite: bool = False) -> list[Tensor]:
        """Return W M of one part, or the columns of [W, b] M of two, those of W and that of b; +0 stays +0.

        They come and go by themselves: joining them would copy W. The result may `overwrite` them.
        """
        raise NotImplementedError

    def stacked(self, others: Sequence["RightFactor"]) -> "RightFactor":
        """Return that of a stack: of this one's layer and others of its kind and shape."""
        if not others:
            return self
        return type(self)(*map(torch.cat, zip(self.tensors, *(other.tensors for other in others), strict=True)))

    def unstacked(self, count: int) -> Sequence["RightFactor"]:
        """Return those of the layers of a stack, of so many: the inverse of `stacked`."""
        if count == 1:
            return [self]
        return [type(self)(*parts) for parts in zip(*(each.chunk(count) for each in self.tensors), strict=True)]


class Whole(RightFactor):
    """A symmetric matrix M itself, shape (…, d, d)."""

    def __init__(self, matrix: Tensor) -> None:
        # In one layout wherever it comes from: in another one products round otherwise, and runs resume inexactly.
        self.matrix = matrix.contiguous()
        self.tensors = [self.matrix]

    @cached_property
    def parts(self) -> list[list[Tensor]]:
        """Its four parts: rows that W multiplies and the row that b multiplies, by columns for W and for b."""
        ends = slice(-1), slice(-1, None)
        return [[self.matrix[..., rows, columns] for columns in ends] for rows in ends]

    def right_multiply(self, parts: Sequence[Tensor], overwrite: bool = False) -> list[Tensor]:
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


class Scales(RightFactor):
    """A diagonal M, for one parameter or this process's part of it: factors d, e, … > 0 that broadcast to a view."""

    def __init__(self, factors: Sequence[float | Tensor], shape: tuple[int, ...] | None = None) -> None:
        self.factors, self.shape = factors, shape

    @property
    def divisor(self) -> float:
        """Of a single number, by how much it divides."""
        return 1 / float(*self.factors)

    def right_multiply(self, parts: Sequence[Tensor], overwrite: bool = False) -> list[Tensor]:
        (weight,) = parts
        product = weight.view(self.shape or weight.shape)
        for place, factor in enumerate(self.factors):
            product = product.mul_(factor) if overwrite or place else product * factor
        # Of one channel a group a view may have other strides than the weight, which no operation in place takes.
        return [weight if overwrite and self.factors else product.view(weight.shape)]

    @cached_property
    def inverse(self) -> "Scales":
        """M⁻¹."""
        return Scales([1 / factor for factor in self.factors], self.shape)
