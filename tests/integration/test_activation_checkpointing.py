"""Activations that are computed again in the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    adamw,
    deviation,
    each_method,
    plain_loop,
    split,
    weights,
)

pytestmark = pytest.mark.usefixtures("in_float64")


class Blocks(nn.Module):
    """A block of its own, and one layer that two other blocks share, each a segment of the checkpointed pass."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.own = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.shared = nn.Linear(8, 8)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (self.own, self._shared, self._shared):
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)

    def _shared(self, x: Tensor) -> Tensor:
        return F.relu(self.shared(x)) + x


def rows(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


@each_method
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_activation_checkpointing(method, use_reentrant):
    model = Blocks(use_reentrant)
    optimizer = method.wrap(adamw(model), model, rows(1)[0][0])
    for batch in rows():
        optimizer.zero_grad()
        for x, y in split(batch, 2):
            (F.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
    assert deviation(weights(model), plain_loop(method, rows(), build=Blocks, parts=2)) <= EXACT
    assert deviation(weights(model), weights(Blocks())) > DIFFERENT
