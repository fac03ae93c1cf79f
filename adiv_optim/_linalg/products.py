"""Products with a Jacobian that is never written down."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vjp

#: Several tensors that together are one vector.
Parts = dict[str, Tensor]


def jvp(function: Callable[[Parts], Tensor], at: Parts, tangent: Parts) -> Tensor:
    """J · tangent, as the derivative of Jᵀu by u: torch lacks forward-mode rules for some operations (weight_norm)."""
    output, pull = vjp(function, at)[:2]
    moved: Tensor = vjp(lambda cotangent: pull(cotangent)[0], torch.zeros_like(output))[1](tangent)[0]
    return moved
