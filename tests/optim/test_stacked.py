"""Small layers of one shape are multiplied together, and step as each does by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_optim.optim import covariance_method
from tests.helpers.cases import relative_error
from tests.helpers.projections import WRAPPERS

pytestmark = pytest.mark.usefixtures("in_float64")


class Reading(torch.optim.AdamW):
    """Of a type of its own: it might read the weights, which are mapped."""


def trained(kind: Any, inner: Any) -> tuple[list[Tensor], list[int]]:
    """The weights, and how many layers each step has treated with others, where one layer is idle now and then."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(6, 6, bias=place < 5) for place in range(6))
    groups = [
        {"params": list(model[:3].parameters()), "weight_decay": 0.5},
        {"params": list(model[3:].parameters()), "lr": 0.2},
    ]
    optimizer = kind(inner(groups, lr=0.1, weight_decay=0.0), model, every=2)
    together = []
    for step in range(6):
        optimizer.zero_grad()
        for place, layer in enumerate(model):
            if place != 1 or step != 2:
                x = torch.randn(9, 6, generator=torch.Generator().manual_seed(10 * step + place))
                layer(x * torch.logspace(0, -1, 6)).square().sum().backward()
        optimizer.step()
        sizes = [len(transform.parameters) for transform in optimizer.method.transforms()]
        together.append(sum(size > 2 for size in sizes))
    return [p.detach() for p in model.parameters()], together


@pytest.mark.parametrize("inner", [torch.optim.AdamW, Reading])
@pytest.mark.parametrize("kind", WRAPPERS.values(), ids=WRAPPERS)
def test_they_step_as_each_by_itself(kind, inner, monkeypatch):
    found, together = trained(kind, inner)
    monkeypatch.setattr(covariance_method, "_SMALL", 0)
    wanted, apart = trained(kind, inner)
    assert max(together) == (0 if kind is WRAPPERS["blocks"] else 2)  # in each of the groups
    assert max(apart) == 0
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) <= 1e-11
