"""Weights in shared memory: one process steps on them as on others, and a second one would read them mapped."""

import pytest
import torch
from torch import nn

from tests.wrappers import WRAPPERS


def reader(read: list[torch.Tensor]) -> type[torch.optim.SGD]:
    """SGD that reads the weights within its step, at the moment at which another process might."""

    class Reader(torch.optim.SGD):
        def step(self, closure=None):
            read[:] = [p.detach().clone() for group in self.param_groups for p in group["params"]]
            return super().step(closure)

    return Reader


def trained(name: str, is_shared: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], nn.Module]:
    """The weights before the last step, as they are read within it, and the model after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(3, 8, 4)
    if is_shared:
        model.share_memory()
    read: list[torch.Tensor] = []
    optimizer = WRAPPERS[name](reader(read)(model.parameters(), lr=0.1), model, x[0])
    for batch in x:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
    return before, read, model


@pytest.mark.parametrize("name", ["whitened", "input-scaled", "unit-consistent", "preconditioned"])
def test_one_process_trains_as_without_and_another_would_read_mapped_weights(name):
    before, read, model = trained(name, is_shared=True)
    *_, alone = trained(name, is_shared=False)
    assert all(p.is_shared() for p in model.parameters())
    assert all(map(torch.equal, model.parameters(), alone.parameters()))
    # Preconditioned maps gradients alone.
    assert all(map(torch.equal, before, read)) == (name == "preconditioned")
