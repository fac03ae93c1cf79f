"""The log least squares behind the RZ scaling of a matrix with zeros."""

import torch
from torch import Tensor

from ..._linalg.conjugate_gradients import conjugate_gradients


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

    def system(vector: Tensor) -> Tensor:
        return vector - column_root * _apply(counts.mT, _apply(counts, column_root * vector) * _reciprocal(row_count))

    # The unknown is the change from here, in coordinates where the system is I - BᵀB with
    # B = diag(C1)^(-1/2) C diag(Cᵀ1)^(-1/2). It stays orthogonal to the null vectors, so that each component keeps the
    # half that it is given here.
    columns = column_sum * _reciprocal(column_count) / 2
    defect = (column_sum - _apply(counts.mT, rows_for(columns)) - column_count * columns) * column_root
    scale = (column_root * column_sum).norm(dim=-1) + (row_root * row_sum).norm(dim=-1)
    goal = torch.finfo(counts.dtype).eps * scale
    columns = columns + conjugate_gradients(system, defect, goal) * column_root
    return rows_for(columns), columns


def _reciprocal(counts: Tensor) -> Tensor:
    # A row or column without logarithms gets the scale exp(0).
    return torch.where(counts > 0, 1 / counts, 0.0)


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]
