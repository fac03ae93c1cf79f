"""Small layers of one shape are multiplied together, and step as each would by itself."""

from typing import Any

import pytest
import torch
from torch import nn

from adiv_optim import Preconditioned, Whitened
from adiv_optim.optim import covariance_method
from tests.helpers.cases import relative_error

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12
METHODS = {
    "whitened": lambda opt, model: Whitened(opt, model, every=3),
    "rank": lambda opt, model: Whitened(opt, model, every=3, rank=2),
    "preconditioned": lambda opt, model: Preconditioned(opt, model, every=3),
}


class Tower(nn.Module):
    """Four layers of one shape, of which the last is called in every other step alone, and one of another shape."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=bias) for _ in range(4))
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, all_layers: bool) -> torch.Tensor:
        """Return the head's outputs."""
        for layer in list(self.layers)[: 3 + all_layers]:
            x = torch.tanh(layer(x))
        return self.head(x)


def trained(method: str, inner: Any, bias: bool) -> tuple[list[torch.Tensor], list[int]]:
    torch.manual_seed(0)
    model = Tower(bias)
    first, rest = list(model.layers[0].parameters()), [*model.layers[1:].parameters(), *model.head.parameters()]
    optimizer = METHODS[method](inner([{"params": first, "weight_decay": 0.3, "lr": 0.05}, {"params": rest}]), model)
    together = []
    for step in range(9):
        optimizer.zero_grad()
        model(torch.randn(7, 5), step % 2 == 0).square().mean().backward()
        optimizer.step()
        together.append(max(len(t.parameters) for t in optimizer.method.transforms()))
    return [p.detach() for p in model.parameters()], together


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inner", [torch.optim.AdamW, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("method", METHODS)
def test_layers_that_are_multiplied_together_step_as_if_apart(method, inner, bias, monkeypatch):
    found, together = trained(method, inner, bias)
    monkeypatch.setattr(covariance_method, "_SMALL", 0)
    wanted, apart = trained(method, inner, bias)
    each = 1 + bias
    assert set(together) == {2 * each, 3 * each}  # those of the second group, with the last layer or without
    assert set(apart) == {2}
    assert all(relative_error(*pair) <= EXACT for pair in zip(found, wanted, strict=True))
