"""Muon in the precision of its weights: those of torch and of pytorch_optimizer work in bfloat16, slow on a CPU."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.table import grouped


class Muon(Optimizer):
    """Muon (Jordan et al. 2024), with Nesterov momentum and steps of AdamW's size (Liu et al. 2025).

    M ← μM + G and W ← W − 0.2 √max(m, n) η O, with O the polar factor of G + μM by five Newton-Schulz iterations.
    Matrices of one shape are iterated together.

    Args:
        params: matrices.
        lr: η.
        momentum: μ.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure if there is one, then take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            for same in grouped(weights, lambda p: p.shape).values():
                gradients = [p.grad for p in same]
                momenta = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in same]
                torch._foreach_mul_(momenta, group["momentum"])
                torch._foreach_add_(momenta, gradients)
                updates = polar(torch.stack(torch._foreach_add(gradients, momenta, alpha=group["momentum"])))
                rate = 0.2 * max(same[0].shape) ** 0.5 * group["lr"]
                torch._foreach_add_(same, list(updates.unbind()), alpha=-rate)
        return loss


def polar(matrices: Tensor) -> Tensor:
    """About the polar factors of a stack of matrices: singular values between 0.7 and 1.2, by Jordan's polynomial."""
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x
