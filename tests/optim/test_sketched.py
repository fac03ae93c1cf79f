"""The leading eigenvectors of what layers read: against explicit matrices, over measurements that drift."""

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Whitened
from tests.helpers.cases import relative_error
from tests.helpers.inputs import spectra_of

pytestmark = pytest.mark.usefixtures("in_float64")

RANK, DECAY = 3, 0.8


def rows_of(layer: nn.Module, x: Tensor) -> Tensor:
    """X~ of every group."""
    if isinstance(layer, nn.Linear):
        rows = x.flatten(0, -2)[None]
    else:
        patches = torch.nn.functional.unfold(x, layer.kernel_size)  # (N, features, positions)
        rows = patches.unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
    return rows if layer.bias is None else torch.cat([rows, torch.ones(*rows.shape[:-1], 1)], -1)


def test_eigenvectors_of_rows_that_stay_are_found():
    torch.manual_seed(0)
    layer, x = nn.Linear(9, 2), torch.randn(200, 9) * torch.logspace(0, -1, 9)
    optimizer = Whitened(torch.optim.SGD(layer.parameters(), lr=0.0), layer, every=1, decay=0.0, rank=RANK)
    wanted = torch.linalg.eigvalsh(rows_of(layer, x)[0].T @ rows_of(layer, x)[0] / 200)[-RANK:]
    errors = []
    for _ in range(60):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        ((_, (values, _)),) = spectra_of(optimizer.method.layers[0])
        errors.append(relative_error(values, wanted))
    assert errors[0] > 1e-2
    assert errors[-1] <= 1e-6


def test_memory_of_groups_can_be_loaded_in_place():
    """As torch.distributed.checkpoint does into an optimizer that has not stepped."""
    layer = nn.Conv2d(4, 6, 3, groups=2)
    optimizer = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer, rank=RANK)
    (kept,) = optimizer.method.layers
    wanted = [torch.randn(tensor.shape) for tensor in kept.memory]
    for number, value in enumerate(wanted):
        optimizer.method.state()[layer.weight][f"{number}"].copy_(value)
    assert all(map(torch.equal, kept.memory, wanted))


@pytest.mark.parametrize(("saved", "own"), [(3, 2), (3, None), (None, 3)])
def test_a_checkpoint_of_another_rank_is_refused_by_both_ranks(saved, own):
    layer = nn.Linear(6, 2)
    first, second = (Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer, rank=rank) for rank in (saved, own))
    layer(torch.randn(8, 6)).sum().backward()
    first.step()
    with pytest.raises(ValueError, match=f"was saved with rank={saved}, this has rank={own};"):
        second.load_state_dict(first.state_dict())
