"""The leading eigenvectors of what layers read, beside their formula, which the fuzzer has."""

import pytest
import torch
from torch import nn

from adiv_optim import Whitened
from tests.helpers.cases import relative_error
from tests.helpers.inputs import spectra_of
from tests.helpers.steps import sgd, stepped

pytestmark = pytest.mark.usefixtures("in_float64")

RANK = 3


def test_eigenvectors_of_rows_that_stay_are_found():
    torch.manual_seed(0)
    layer, x = nn.Linear(9, 2, bias=False), torch.randn(200, 9) * torch.logspace(0, -1, 9)
    optimizer = Whitened(sgd(layer, lr=0.0), layer, every=1, decay=0.0, rank=RANK)
    wanted = torch.linalg.eigvalsh(x.T @ x / 200)[-RANK:]
    errors = []
    for _ in range(60):
        stepped(layer, optimizer, x)
        ((_, (values, _)),) = spectra_of(optimizer.method.layers[0])
        errors.append(relative_error(values, wanted))
    assert errors[0] > 1e-2
    assert errors[-1] <= 1e-6


def test_memory_of_groups_can_be_loaded_in_place():
    """As torch.distributed.checkpoint does into an optimizer that has not stepped."""
    layer = nn.Conv2d(4, 6, 3, groups=2)
    optimizer = Whitened(sgd(layer), layer, rank=RANK)
    (kept,) = optimizer.method.layers
    wanted = [torch.randn(tensor.shape) for tensor in kept.memory]
    for number, value in enumerate(wanted):
        optimizer.method.state()[layer.weight][f"{number}"].copy_(value)
    assert all(map(torch.equal, kept.memory, wanted))


@pytest.mark.parametrize(("saved", "own"), [(3, 2), (3, None), (None, 3)])
def test_a_checkpoint_of_another_rank_is_refused_by_both_ranks(saved, own):
    layer = nn.Linear(6, 2)
    first, second = (Whitened(sgd(layer), layer, rank=rank) for rank in (saved, own))
    layer(torch.randn(8, 6)).sum().backward()
    first.step()
    with pytest.raises(ValueError, match=f"was saved with rank={saved}, this has rank={own};"):
        second.load_state_dict(first.state_dict())
