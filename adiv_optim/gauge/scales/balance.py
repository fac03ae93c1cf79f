"""The log least squares behind the RZ scaling of a matrix with zeros."""

import torch
from torch import Tensor

from ..._linalg.conjugate_gradients import conjugate_gradients

#: Smaller sides up to this are factorised at once; beyond, conjugate gradients get the first try.
DIRECT = 256
#: Conjugate gradients that need more steps than this cost more than the factorisation.
MAX_ITERATIONS = 100


def balance(counts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    r"""Fit :math:`r_i + c_j` to logarithms that some pairs (i, j) have and others lack.

    Minimises :math:`\sum (\log|w| - r_i - c_j)^2` over the logarithms there are, sums L of C each:

    .. math:: \begin{pmatrix} \mathrm{diag}(C1) & C \\ C^\top & \mathrm{diag}(C^\top 1) \end{pmatrix}
              \begin{pmatrix} r \\ c \end{pmatrix} = \begin{pmatrix} L1 \\ L^\top 1 \end{pmatrix},

    a bipartite Laplacian up to signs. The longer side is eliminated. Of the :math:`r + t, c - t` on a connected
    component it returns the one in which rows and columns explain half each; 0 for rows without logarithms.
    """
    if counts.shape[-2] < counts.shape[-1]:
        columns, rows = balance(counts.mT, sums.mT)
        return rows, columns

    row_sum, column_sum = sums.sum(-1), sums.sum(-2)
    row_count, column_count = counts.sum(-1), counts.sum(-2)
    row_root, column_root = _reciprocal(row_count).sqrt(), _reciprocal(column_count).sqrt()

    def rows_for(columns: Tensor) -> Tensor:
        return (row_sum - _apply(counts, columns)) * _reciprocal(row_count)

    def defect(columns: Tensor) -> Tensor:
        return (column_sum - _apply(counts.mT, rows_for(columns)) - column_count * columns) * column_root

    # The unknown is the change from here, in coordinates where the system is I - BᵀB with
    # B = diag(C1)^(-1/2) C diag(Cᵀ1)^(-1/2). Both ways to solve it stay orthogonal to its null vectors,
    # so each component keeps the half that it is given here.
    columns = column_sum * _reciprocal(column_count) / 2
    if counts.shape[-1] > DIRECT:

        def system(vector: Tensor) -> Tensor:
            there = _apply(counts, column_root * vector) * _reciprocal(row_count)
            return vector - column_root * _apply(counts.mT, there)

        scale = (column_root * column_sum).norm(dim=-1) + (row_root * row_sum).norm(dim=-1)
        goal = 32 * torch.finfo(counts.dtype).eps * scale
        change, solved = conjugate_gradients(system, defect(columns), goal, MAX_ITERATIONS)
        if solved:
            columns = columns + change * column_root
            return rows_for(columns), columns
    factor = _factor(counts * row_root[..., :, None] * column_root[..., None, :], column_count)
    # The first round solves; the others remove the rounding in I - BᵀB, magnified by 1 / gap.
    for _ in range(3):
        columns = columns + torch.cholesky_solve(defect(columns)[..., None], factor)[..., 0] * column_root
    return rows_for(columns), columns


def _reciprocal(counts: Tensor) -> Tensor:
    # A row or column without logarithms gets the scale exp(0).
    return torch.where(counts > 0, 1 / counts, 0.0)


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _factor(link: Tensor, column_count: Tensor) -> Tensor:
    """The Cholesky factor of I - BᵀB, with its null vectors, one per component, raised to eigenvalue 1."""
    size = link.shape[-1]
    system = link.mT @ link
    label = _components(system > 0)
    volume = torch.zeros_like(column_count).scatter_add_(-1, label, column_count).gather(-1, label)
    null = (column_count * _reciprocal(volume)).sqrt()
    same = label[..., :, None] == label[..., None, :]
    system.neg_().add_(same * null[..., :, None] * null[..., None, :])
    # The ridge, of the size of the rounding in BᵀB, keeps a factor within reach where a gap is smaller still.
    system.diagonal(dim1=-2, dim2=-1).add_(1 + size * torch.finfo(link.dtype).eps)
    return torch.linalg.cholesky(system)


def _components(adjacent: Tensor) -> Tensor:
    """For each node the least index of a node in its component; `adjacent` has shape (batch, n, n)."""
    size = adjacent.shape[-1]
    label = torch.arange(size, device=adjacent.device).expand(adjacent.shape[:-1])
    while True:
        near = torch.where(adjacent, label[..., None, :], size).amin(-1).minimum(label)
        # Every node also tells the node it is labelled by, and takes that one's label: the number of rounds grows
        # with the logarithm of a chain's length, not with the length.
        new = label.scatter_reduce(-1, label, near, "amin").minimum(near)
        new = new.gather(-1, new)
        if torch.equal(new, label):
            return label
        label = new
