"""Work that is cut into slices: slices of 4 with an uneven remainder give the result of one slice."""

import pytest
import torch
from torch import nn

from adiv_optim import gauge
from adiv_optim.gauge.scales import network

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "zeros"])
@torch.no_grad()
def test_weights_whose_logarithms_are_taken_at_once(zeros, monkeypatch):
    # Two rows of the first weight are a slice, and the seventh one is left; a row of each other weight is one.
    model = nn.Sequential(nn.Linear(2, 7), nn.ReLU(), nn.Linear(7, 3), nn.ReLU(), nn.Linear(3, 1))
    graph, parameters = gauge.trace(model, torch.randn(1, 2)), dict(model.named_parameters())
    if zeros:
        model[0].weight[2, 1] = model[2].weight[1, 4] = 0
    whole = gauge.network_scales(graph, parameters)
    monkeypatch.setattr(network, "WEIGHTS_AT_ONCE", 4)
    slices = []
    original = network._sums_of_part
    monkeypatch.setattr(network, "_sums_of_part", lambda *args: slices.append(len(args[0])) or original(*args))
    assert (gauge.network_scales(graph, parameters) - whole).abs().max() <= 1e-12
    assert slices[:7] == [2, 2, 2, 1, 1, 1, 1]
    model[0].weight[6] *= 2  # the last row counts
    assert (gauge.network_scales(graph, parameters) - whole).abs().max() > 1e-2
