"""A small network, and steps on it, for tests of what a wrapper does at a step."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from adiv_optim import GradientOnly, InputScaled, Preconditioned, Proportional, UnitConsistent, Whitened

#: Wrappers by the names of their classes, around an optimizer of `network`; and of those the ones that map weights.
BY_CLASS: dict[str, Callable[..., Any]] = {
    "Whitened": Whitened,
    "InputScaled": InputScaled,
    "UnitConsistent": lambda inner, model: UnitConsistent(inner, model, example_input=torch.ones(1, 4)),
    "Preconditioned": Preconditioned,
    "GradientOnly": lambda inner, model: GradientOnly(inner, model, Proportional()),
}
MAPPING = ("Whitened", "InputScaled", "UnitConsistent")
#: What is kept of a covariance: all of it, its blocks, a rank, its inverse.
BY_COVARIANCE: dict[str, Callable[..., Any]] = {
    "whole": Whitened,
    "blocks": partial(Whitened, max_dim=4),
    "rank": partial(Whitened, rank=3),
    "inverse": Preconditioned,
}
each_by_inputs = pytest.mark.parametrize("wrapper", [Whitened, Preconditioned, InputScaled])


def network(*sizes: int) -> nn.Sequential:
    """A perceptron of 4, 5 and 3 features, or of these, the same at each call."""
    torch.manual_seed(0)
    layers = [part for ends in pairwise(sizes or (4, 5, 3)) for part in (nn.Linear(*ends), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def inputs(seed: int, rows: int = 8, features: int = 4, size: float = 1.0) -> Tensor:
    return size * torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> Optimizer:
    return SGD(model.parameters(), lr=lr, **options)


def stepped(model: nn.Module, optimizer: Any, *batches: Tensor) -> list[Tensor]:
    """The weights after a step on the mean square of what the model makes of each batch."""
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return weights(model)


def backward(model: nn.Module, x: Tensor) -> Tensor:
    """What the model makes of x; gradients as of a loss that has random ones there."""
    output: Tensor = model(x)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output.dtype))
    return output


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(ones: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether all are equal, bit for bit but for the sign of 0."""
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
