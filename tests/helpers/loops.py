"""Every wrapper, and the plain loop that it is held against wherever it is used."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

from adiv_optim import Correction, jacobian
from tests.helpers.cases import relative_error
from tests.helpers.seeds import manual_seed
from tests.wrappers import WRAPPERS, Wrapper

EXACT = 1e-9  # float64; Cholesky factors and roots square the condition of the rows
DIFFERENT = 1e-3  # what a test must be able to tell apart

Batch = tuple[Tensor, Tensor]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Method:
    """A wrapper and its reference.

    Where a wrapper has a rule, the reference is a bare optimizer on the gradients of explicit Jacobians; where it has
    none, the wrapper itself in the plainest loop, which other tests hold against its formula.

    Args:
        wrap: (optimizer, model, example input) → the wrapper.
    """

    wrap: Wrapper

    @property
    def rule(self) -> Correction | None:
        return self.wrap.rule

    @property
    def additive(self) -> bool:
        """Whether micro-batches, and processes, are to give what the joined batch gives."""
        return self.rule is None or self.rule.additive

    def backward(self, model: nn.Module, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
        """Add to p.grad what a step is to find there."""
        if self.rule is None:
            (scale * F.cross_entropy(model(x), y)).backward()
        else:
            jacobian.backward(model, lambda z, target: scale * F.cross_entropy(z, target), x, y, self.rule)


METHODS = {name: Method(wrap) for name, wrap in WRAPPERS.items() if name != "whitened-rank"}
# Measured at every step, it has nothing to forget where a checkpoint keeps what torch's own optimizers keep.
METHODS["unit-consistent"] = Method(replace(WRAPPERS["unit-consistent"], settings={"every": 1}))
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
each_method_by_name = pytest.mark.parametrize("name", METHODS)


def network() -> nn.Module:
    manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


def elsewhere(build: Callable[[], nn.Module] = network) -> nn.Module:
    """What only a checkpoint brings to where `build` starts."""
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    return model


def images(count: int = 4) -> list[Batch]:
    """Batches of eight for `network`."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 2, 5, 5, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def halving(model: nn.Module) -> Optimizer:
    """`adamw` at half the learning rate after every step: what `scheduled` asks of a scheduler."""
    optimizer = adamw(model)

    def halve(optimizer: Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] /= 2

    optimizer.register_step_post_hook(halve)
    return optimizer


def scheduled(optimizer: Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, gamma=0.5)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def built(
    method: Method, build: Callable[[], nn.Module] = network, inner: Callable[[nn.Module], Optimizer] = adamw
) -> tuple[nn.Module, Any]:
    model = build()
    return model, method.wrap(inner(model), model, images(1)[0][0].to(next(model.parameters())))


def split(batch: Batch, parts: int) -> list[Batch]:
    x, y = batch
    return list(zip(x.chunk(parts), y.chunk(parts), strict=True))


def train(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def plain_loop(
    method: Method,
    data: list[Batch],
    *,
    build: Callable[[], nn.Module] = network,
    inner: Callable[[nn.Module], Optimizer] = adamw,
    parts: int = 1,
    change: Callable[[nn.Module], None] = lambda model: None,
) -> Weights:
    """The weights after one process's loop over joined batches: those of the bare optimizer on oracle gradients.

    Where there is no oracle they are the wrapper's. A correction that does not add up gets the mean of `parts` ideal
    gradients, as its docstring says of micro-batches and processes. `change` is applied to p.grad before every step.
    """
    model = build()
    optimizer = inner(model) if method.rule else method.wrap(inner(model), model, data[0][0])
    for batch in data:
        optimizer.zero_grad()
        pieces = [batch] if method.additive else split(batch, parts)
        for x, y in pieces:
            method.backward(model, x, y, 1 / len(pieces))
        change(model)
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def deviation(found: Weights, wanted: Weights) -> float:
    """Greatest relative error of any parameter."""
    assert found.keys() == wanted.keys()
    return max(relative_error(found[name], value) for name, value in wanted.items())
