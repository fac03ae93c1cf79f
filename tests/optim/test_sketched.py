"""The leading eigenvectors of what layers read, beside their formula, which the fuzzer has."""

import pytest
import torch
from torch import nn

from adiv_optim import Whitened
from tests.helpers.cases import relative_error
from tests.helpers.remembered import covariance_of
from tests.helpers.steps import sgd, stepped

pytestmark = pytest.mark.usefixtures("in_float64")

RANK = 3


def test_eigenvectors_of_rows_that_stay_are_found():
    layer, x = nn.Linear(9, 2, bias=False), torch.randn(200, 9) * torch.logspace(0, -1, 9)
    optimizer = Whitened(sgd(layer), layer, every=1, decay=0.0, rank=RANK, graft_norm=False)
    values, vectors = torch.linalg.eigh(x.T @ x / 200)
    values[:-RANK] = values[:-RANK].mean()
    wanted = vectors * values @ vectors.T
    errors = []
    for _ in range(60):
        stepped(layer, optimizer, x)
        errors.append(relative_error(covariance_of(optimizer, layer), wanted))
    assert errors[0] > 1e-2
    assert errors[-1] <= 1e-6


@pytest.mark.parametrize("own", [{}, {"rank": 2}, {"max_dim": 3}], ids=str)
def test_a_checkpoint_of_a_setting_that_makes_other_shapes_is_refused(own):
    layer = nn.Linear(6, 2)
    first, second = (Whitened(sgd(layer), layer, **settings) for settings in ({"rank": 3}, own))
    layer(torch.randn(8, 6)).sum().backward()
    first.step()
    with pytest.raises(ValueError, match=r"'adiv_optim.inputs.\d'.*; load what was saved .* with the same settings"):
        second.load_state_dict(first.state_dict())
