"""Conjugate gradients for symmetric systems, singular ones too, side by side."""

from collections.abc import Callable

import torch
from torch import Tensor

from . import host

#: Iterations between two looks at whether all is done, each of which waits for the device.
_UNSEEN = 4


def conjugate_gradients(
    system: Callable[[Tensor], Tensor], right: Tensor, goal: Tensor, max_iterations: int
) -> tuple[Tensor, bool]:
    """Solve `system(y) = right`; of a singular system the solution of least norm.

    Hestenes and Stiefel 1952.

    Args:
        system: a symmetric positive semidefinite map of vectors, each problem's its own.
        right: shape (…, n), in the system's range up to rounding; leading dimensions count problems.
        goal: the norm of a residual that is small enough, shape (…).
        max_iterations: stop after so many, wherever that is.

    Returns:
        The solution, and whether every residual reached its goal.

    Example:
        >>> import torch
        >>> matrix = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> conjugate_gradients(lambda y: y @ matrix, torch.tensor([2.0, 2.0]), torch.tensor(1e-6), 2)
        (tensor([1.0000, 0.5000]), True)
    """
    solution, residual, direction = torch.zeros_like(right), right, right
    gamma = right.square().sum(-1)
    for number in range(max_iterations):
        open = gamma > goal.square()
        if number % _UNSEEN == 0 and all(host.read(~open.any())):
            break
        moved = system(direction)
        # A problem that is done must not go on: what is left of it is rounding, which a singular system cannot solve.
        step = torch.where(open, gamma / (direction * moved).sum(-1), 0.0)[..., None]
        solution = solution + step * direction
        residual = residual - step * moved
        previous, gamma = gamma, residual.square().sum(-1)
        direction = residual + torch.where(open, gamma / previous, 0.0)[..., None] * direction
    return solution, all(host.read(~(gamma > goal.square()).any()))
