"""MAC, a rival from another paper: the input covariance by the mean of the inputs alone."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_optim.optim.wrapper import OptimizerWrapper

#: Of the mean, for each forward pass.
DECAY = 0.95


class MAC(OptimizerWrapper):
    r"""Multiply gradients by :math:`I - \bar a \bar a^\top / (\rho + |\bar a|^2)`, with ā the mean of x~ = (x, 1).

    That is ρ times the inverse of A ≈ āāᵀ + ρI by Sherman and Morrison (Seung, Lee and Ko 2025, arXiv 2506.08464);
    nothing is mapped back. ā is a running mean. ρ is in units of |ā|²/d, the mean eigenvalue of āāᵀ, where the paper
    has an adaptive one.

    Args:
        optimizer: takes the step.
        model: linear layers and convolutions of one group; other parameters keep their gradients.
        damping: ρ in these units.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, damping: float) -> None:
        super().__init__(optimizer)
        self.damping, self.means = damping, dict[Any, Tensor]()
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.register_forward_pre_hook(partial(_count, self.means))

    @torch.no_grad()
    def _inner_step(self, *args: Any, **kwargs: Any) -> None:
        for module, mean in self.means.items():
            own: list[Any] = [parameter for parameter in (module.weight, module.bias) if parameter is not None]
            if any(parameter.grad is None for parameter in own):
                continue
            mean = mean[: sum(_columns(parameter) for parameter in own)]
            square = mean.square().sum()
            joined = torch.cat([parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
                                for parameter in own], 1)  # fmt: skip
            joined -= (joined @ mean / (square * (1 + self.damping / len(mean)))).outer(mean)
            for parameter, part in zip(own, joined.split([_columns(parameter) for parameter in own], 1), strict=True):
                parameter.grad = part.reshape(parameter.shape).contiguous()  # as fused optimizers read it
        super()._inner_step(*args, **kwargs)


def _columns(parameter: Tensor) -> int:
    return parameter[0].numel()


def _count(means: dict[Any, Tensor], module: Any, inputs: Iterable[Tensor]) -> None:
    if not (module.training and torch.is_grad_enabled()):
        return
    (x,) = inputs
    x = x.detach()
    if isinstance(module, nn.Conv2d):
        x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
    mean = F.pad(x.flatten(0, -2).mean(0), (0, 1), value=1.0)
    means[module] = means[module].lerp(mean, 1 - DECAY) if module in means else mean
