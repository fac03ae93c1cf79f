"""The damped least squares of a step, solved by QR."""

from collections.abc import Callable

import torch
from torch import Tensor


def solver(jacobian: Tensor, ridge: float) -> Callable[[Tensor], Tensor]:
    """Return v → Jᵀ(JJᵀ + λI)⁻¹ v = (JᵀJ + λI)⁻¹ Jᵀv, by the QR factors of Jᵀ over √λ I, or of J where it is tall."""
    is_wide = len(jacobian) <= jacobian.shape[1]
    tall = jacobian.mT if is_wide else jacobian
    rows, size = tall.shape
    stacked = tall.new_zeros(size, rows + size).mT  # by columns, as LAPACK takes it
    stacked[:rows] = tall
    stacked[rows:].diagonal().fill_(ridge**0.5)
    factors, tau = torch.geqrf(stacked)
    triangle = factors[:size]  # with reflectors below the diagonal, which are not read

    def solve(v: Tensor) -> Tensor:
        padded = v.new_zeros(rows + size, 1)
        if is_wide:
            padded[:size] = torch.linalg.solve_triangular(triangle.mT, v[:, None], upper=False)
            return torch.ormqr(factors, tau, padded)[:rows, 0]
        padded[:rows, 0] = v
        turned = torch.ormqr(factors, tau, padded, transpose=True)[:size]
        return torch.linalg.solve_triangular(triangle, turned, upper=True)[:, 0]

    return solve
