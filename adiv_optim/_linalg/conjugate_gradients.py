"""Conjugate gradients for symmetric systems, singular ones too, side by side."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import host

#: Iterations between two looks at whether all is done, each of which waits for the device.
_UNSEEN = 4


def conjugate_gradients(
    system: Callable[[Tensor], Tensor], right: Tensor, goal: Tensor, max_iterations: int = 2000
) -> Tensor:
    """Solve `system(y) = right`; of a singular system the solution of least norm. Hestenes and Stiefel 1952.

    Restarted until the true residual, which rounding parts from the one that is carried along, is small enough or stops
    falling. `right` has shape (…, n), problems in front, and lies in the system's range up to rounding; `goal`, (…), is
    the norm of a residual that is small enough.
    """
    solution, least = torch.zeros_like(right), math.inf
    for _ in range(4):
        residual = right - system(solution)
        worst = max(host.read(residual.norm(dim=-1) / goal.clamp_min(torch.finfo(goal.dtype).tiny)), default=0.0)
        if not 1 < worst < 0.5 * least:
            break
        solution, least = solution + _once(system, residual, goal, max_iterations), worst
    return solution


def _once(system: Callable[[Tensor], Tensor], right: Tensor, goal: Tensor, max_iterations: int) -> Tensor:
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
    return solution
