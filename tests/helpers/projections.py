"""A small model whose layers read one tensor, or copies of it, and which of them share a covariance."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adiv_optim import Preconditioned, Whitened

WRAPPERS: dict[str, Callable[..., Any]] = {
    "whitened": Whitened,
    "blocks": lambda *given, **options: Whitened(*given, max_dim=4, **options),
    "rank": lambda *given, **options: Whitened(*given, rank=2, **options),
    "preconditioned": Preconditioned,
}


class Projections(nn.Module):
    """Three layers that read what `given` makes of the input for each of them, and one that reads theirs."""

    def __init__(self, given: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 4), nn.Linear(6, 5), nn.Linear(6, 4), nn.Linear(4, 3)
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        x, y, z = self.given(x)
        return self.out(self.q(x).tanh() * self.k(y).sum(-1, keepdim=True) + self.v(z))


def one(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x, x


def copies(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x.clone(), x.clone()


def built(given: Callable[..., Any] = one, kind: Callable[..., Any] = Whitened, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Projections(given)
    return model, kind(torch.optim.AdamW(model.parameters(), lr=0.1), model, **{"every": 2, **options})


def inputs(seed: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def step(model: nn.Module, optimizer: Any, *batches: Tensor) -> None:
    optimizer.zero_grad()
    for x in batches:
        backward(model, x)
    optimizer.step()


def layer(optimizer: Any, name: str) -> Any:
    return next(each for each in optimizer.method.layers if each.name == f"{name}.weight")


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def sharing(optimizer: Any) -> str:
    """Which of k and v have the memory of q, and what was made of it."""
    first, found = layer(optimizer, "q"), ""
    measured = optimizer.method.measured
    for follower in (layer(optimizer, name) for name in "kv"):
        shared = follower.memory is first.memory
        assert shared == (measured[follower.name] is measured[first.name])
        found += follower.name[0] if shared else ""
    return found
