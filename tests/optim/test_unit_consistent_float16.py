"""UnitConsistent on float16 weights whose scales lie outside of float16's range."""

import copy

import pytest
import torch
from torch import nn

from adiv_optim import UnitConsistent, gauge

GAUGES = {"network": gauge.NetworkGauge(), "layer": gauge.LayerGauge()}


@pytest.mark.parametrize("rule", GAUGES.values(), ids=GAUGES)
@pytest.mark.parametrize("power", [-12.0, 12.0])
@pytest.mark.parametrize("lr", [0.0, 1.0])
def test_far_rescaled_hidden_units_keep_finite_weights(rule, power, lr):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    graph = gauge.trace(model, torch.randn(2, 6).double())
    with torch.no_grad():  # e^12 = 1.6e5 is more than float16 holds, e^-12 times a weight less than it resolves
        model[0].weight *= torch.tensor([power, *[0.0] * 7]).double().exp()[:, None]
        model[2].weight *= torch.tensor([-power, *[0.0] * 7]).double().exp()
    model = model.half()
    model[0].weight.data[0].clamp_(-6e4, 6e4)
    exact = copy.deepcopy(model).double()
    for net in (model, exact):
        before = [p.detach().clone() for p in net.parameters()]
        optimizer = UnitConsistent(torch.optim.SGD(net.parameters(), lr=lr), net, graph=graph, gauge=rule)
        for p in net.parameters():
            p.grad = 1e-3 * torch.ones_like(p)
        optimizer.step()
        if lr == 0:
            assert all(torch.equal(p, saved) for p, saved in zip(net.parameters(), before, strict=True))
    for found, wanted in zip(model.parameters(), exact.parameters(), strict=True):
        within = wanted.abs() < 6e4
        # A unit of rounding, of the weight or of float16's least numbers, for each of the step's three roundings.
        tolerance = 3 * torch.maximum(wanted.abs() * 2.0**-11, torch.tensor(2.0**-24).double())
        assert bool(((found.double() - wanted).abs() <= tolerance)[within].all())
