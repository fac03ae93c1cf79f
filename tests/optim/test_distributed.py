"""Two processes with half of every batch each are one process with the whole."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import Whitened
from tests.helpers.cases import relative_error
from tests.helpers.processes import needs_distributed, on_two_processes

EXACT = 1e-9
pytestmark = pytest.mark.usefixtures("in_float64")


def trained(rank: int | None, joined: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The weights after a few steps of Whitened(AdamW); as a process of two with a rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3))
    replica = model if rank is None else nn.parallel.DistributedDataParallel(model)
    optimizer = Whitened(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), model, every=2)
    for x, y in joined:
        optimizer.zero_grad()
        part = (x, y) if rank is None else (x.chunk(2)[rank], y.chunk(2)[rank])
        F.cross_entropy(replica(part[0]), part[1]).backward()
        optimizer.step()
    return model.state_dict()


@needs_distributed
def test_whitened_on_two_processes_is_one_on_the_joined_batch(tmp_path):
    generator = torch.Generator().manual_seed(0)
    joined = [
        (torch.randn(8, 2, 5, 5, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(5)
    ]
    wanted = trained(None, joined)
    one, two = on_two_processes(trained, tmp_path, joined)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert max(relative_error(one[name], value) for name, value in wanted.items()) <= EXACT
    half = trained(None, [(x[:4], y[:4]) for x, y in joined])
    assert relative_error(half["0.weight"], wanted["0.weight"]) > 1e-3
