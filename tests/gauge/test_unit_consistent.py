"""UnitConsistent beside its formula, which the fuzzer has: which parameters it maps, and what weights it can hold."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import UnitConsistent, gauge
from tests.helpers.covering import paired
from tests.helpers.gauge_models import mlp
from tests.helpers.proximal import Proximal
from tests.helpers.unit_consistent import BATCHES, GAUGES, train, wrapped

pytestmark = pytest.mark.usefixtures("in_float64")


class Unknown(torch.optim.SGD):
    """Of a type of its own: it might read the weights, which are mapped."""


def test_gradients_freed_within_the_step():
    """As some optimizers do to save memory."""
    (model, optimizer), (plain_model, plain) = (wrapped(lambda p: Unknown(p, lr=0.1)) for _ in range(2))
    optimizer.inner.register_step_post_hook(lambda inner, *_: inner.zero_grad())
    for net, opt in ((model, optimizer), (plain_model, plain)):
        train(net, opt, BATCHES[:2])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain_model.parameters(), strict=True))
    assert model[0].weight.grad is None


def test_parameters_outside_the_graph_take_the_plain_step():
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "outside": nn.Linear(3, 2)})
    model.forward = lambda x: model["used"](x)
    with pytest.warns(UserWarning, match="not used by the traced call"):
        optimizer = UnitConsistent(torch.optim.SGD(model.parameters(), lr=0.5), model, example_input=torch.randn(1, 3))
    weight = model["outside"].weight
    before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weight, before - 0.5)


def test_weights_of_another_optimizer_are_left_to_it():
    torch.manual_seed(0)
    model = mlp()
    model[0].weight.data.mul_(30)
    seen = []
    optimizer = UnitConsistent(torch.optim.SGD(model[0].parameters(), lr=0.1), model, example_input=torch.randn(2, 6))
    every = UnitConsistent(torch.optim.SGD(model.parameters(), lr=0.1), model, example_input=torch.randn(2, 6))
    optimizer.inner.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model[2].parameters()))
    F.cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
    wanted = [p.grad.clone() for p in model[2].parameters()]
    optimizer.step()
    assert 0 < len(optimizer.coverage().treated) < len(every.coverage().treated)  # which has scales of all layers
    assert all(torch.equal(one, two) for one, two in zip(seen, wanted, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_without_magnitude_are_refused_and_left(value):
    model, optimizer = wrapped()
    with torch.no_grad():
        model[2].weight[1, 1] = value
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'2.weight' holds (NaN|inf)"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) or "2.weight" in name for name, p in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@paired("value sigma", {"zero": 0.0, "minus-zero": -0.0, "inf": torch.inf, "nan": torch.nan}, {"0.5": 0.5, "3": 3.0})
def test_step_may_land_on_zero_or_infinity(value, dtype, sigma):
    torch.manual_seed(0)
    model = mlp().to(dtype)
    graph = gauge.trace(model, torch.randn(2, 6).to(dtype))
    gauge.apply_gauge(model, graph, gauge.random_gauge(graph, sigma, generator=torch.Generator().manual_seed(0)))
    before = copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    UnitConsistent(Proximal(model.parameters(), value), model, graph=graph).step()
    for p, saved in zip(model.parameters(), before.parameters(), strict=True):
        same = p == saved
        wanted = torch.full_like(p, value)
        landed = p.isnan() if value != value else p == wanted
        assert bool((same | landed).all())
        assert bool(landed.any())


@pytest.mark.parametrize("rule", GAUGES.values(), ids=GAUGES)
@pytest.mark.parametrize("power", [-12.0, 12.0])
def test_far_rescaled_hidden_units_of_float16_keep_finite_weights(rule, power):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    graph = gauge.trace(model, torch.randn(2, 6))
    with torch.no_grad():  # e^12 = 1.6e5 is more than float16 holds, e^-12 times a weight less than it resolves
        model[0].weight *= torch.tensor([power, *[0.0] * 7]).double().exp()[:, None]
        model[2].weight *= torch.tensor([-power, *[0.0] * 7]).double().exp()
    model = model.half()
    model[0].weight.data[0].clamp_(-6e4, 6e4)
    exact = copy.deepcopy(model).double()
    for net in (model, exact):
        optimizer = UnitConsistent(torch.optim.SGD(net.parameters(), lr=1.0), net, graph=graph, gauge=rule)
        for p in net.parameters():
            p.grad = 1e-3 * torch.ones_like(p)
        optimizer.step()
    for half, wanted in zip(model.parameters(), exact.parameters(), strict=True):
        within = wanted.abs() < 6e4
        # A unit of rounding, of the weight or of float16's least numbers, for each of the step's three roundings.
        tolerance = 3 * torch.maximum(wanted.abs() * 2.0**-11, torch.tensor(2.0**-24).double())
        assert bool(((half.double() - wanted).abs() <= tolerance)[within].all())
