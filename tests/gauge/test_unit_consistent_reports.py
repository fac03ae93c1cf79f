"""What UnitConsistent tells of itself: coverage, one warning where it does little, metrics, repr; and giving it up."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn

from adiv_optim import UnitConsistent, gauge
from tests.helpers.modules import Model
from tests.helpers.unit_consistent import BATCHES, train

pytestmark = pytest.mark.usefixtures("in_float64")


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 7), activation(), nn.Linear(7, 4))


def wrap(model: nn.Module, **options) -> UnitConsistent:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return UnitConsistent(inner, model, example_input=torch.ones(2, 6), **options)


def step(model: nn.Module, optimizer) -> None:
    train(model, optimizer, BATCHES[:1])


def test_coverage_says_how_every_parameter_is_treated_or_why_not():
    model = nn.ModuleDict({"used": mlp(), "unused": nn.Linear(3, 2)})
    model.forward = lambda x: model["used"](x)
    model["used"][0].bias.requires_grad_(False)
    coverage = wrap(model).coverage()
    assert coverage.treated == {
        "used.0.weight": "network gauge, 8 of 8 outputs free",
        "used.2.weight": "network gauge, 7 of 7 outputs and 8 of 8 inputs free",
        "used.2.bias": "network gauge, 7 of 7 outputs free",
        "used.4.weight": "network gauge, 7 of 7 inputs free",
    }
    assert coverage.skipped == {
        "used.0.bias": "frozen",
        "used.4.bias": "pinned: output of the model",
        "unused.weight": "not used by the traced call",
        "unused.bias": "not used by the traced call",
    }
    assert coverage.elements == {name: p.numel() for name, p in model.named_parameters()}


def test_coverage_is_what_a_step_does():
    # A parameter is treated if and only if its step is not the plain one.
    def mixed(model, x):
        return model.head(model.slope(model.first(x)) + model.tanh(x[:, :1].expand(-1, 8)).tanh() * model.offset[0])

    torch.manual_seed(0)
    parts = {"first": nn.Linear(6, 8), "tanh": nn.Linear(8, 8), "head": nn.Linear(8, 4), "slope": nn.PReLU()}
    mixture = Model(mixed, **parts, offset=nn.Parameter(torch.randn(2, 1)))
    for model in (mixture, mlp(), nn.Sequential(mlp(), nn.ReLU6(), nn.Linear(4, 4), nn.BatchNorm1d(4))):
        plain = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = wrap(model)
        graph = gauge.trace(model, torch.ones(2, 6))
        gauge.apply_gauge(model, graph, gauge.random_gauge(graph))
        plain.load_state_dict(model.state_dict())
        step(model, optimizer)
        step(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
        there = dict(plain.named_parameters())
        other = {name for name, p in model.named_parameters() if not torch.equal(p, there[name])}
        assert other == set(optimizer.coverage().treated)


def test_network_without_free_scales_is_told_once_with_reason_and_remedy():
    model = mlp(nn.Tanh)
    message = r"less than half of the elements of Sequential.* pinned: tanh in 1 \(.*\).* use those, or"
    with pytest.warns(UserWarning, match=message) as told:
        optimizer = wrap(model)
    assert len(told) == 1
    assert told[0].filename == __file__
    step(model, optimizer)  # warnings are errors: no second word
    assert optimizer.coverage().parameter_share == 0
    assert measured(optimizer) == {"UnitConsistent/measurements": 1.0, "UnitConsistent/free_scales": 0.0}


def test_less_than_half_is_told_and_half_is_not():
    wide, narrow = nn.Linear(6, 8), nn.Linear(8, 30)
    with pytest.warns(UserWarning, match=r"less than half .*: pinned: output of the model \(62.0% .* in 3 \(1.7%"):
        wrap(nn.Sequential(wide, nn.ReLU(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 30)))
    wrap(nn.Sequential(wide, nn.ReLU(), narrow))
    frozen = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 300))
    frozen[4].requires_grad_(False)
    wrap(frozen)  # what does not train is no part of the share


def test_channels_last_weights_of_one_input_channel_step_as_others():
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).to(memory_format=layout)
        x = torch.randn(2, 1, 6, 6)
        optimizer = UnitConsistent(torch.optim.AdamW(model.parameters(), lr=0.1), model, example_input=x)
        model(x).square().sum().backward()
        optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert all(torch.allclose(p, other, rtol=1e-12) for p, other in zip(*ends, strict=True))


def test_a_graph_of_another_model_is_refused():
    graph = gauge.trace(mlp(), torch.ones(2, 6))
    model = nn.Sequential(nn.Linear(6, 8, bias=False), *mlp()[1:])
    with pytest.raises(ValueError, match=r"the graph has '0.bias', which the model has not; trace this model"):
        UnitConsistent(torch.optim.SGD(model.parameters(), lr=0.1), model, graph=graph)


def test_scales_of_a_parameter_that_a_checkpoint_lacks_follow_from_the_channels_of_others():
    model = mlp()
    optimizer = wrap(model, gauge=gauge.NetworkGauge(every=10))
    step(model, optimizer)
    saved, whole = optimizer.state_dict(), optimizer.state_dict()["state"][0]
    saved["state"][0] = {name: value for name, value in saved["state"][0].items() if "adiv" not in name}
    with pytest.warns(UserWarning, match="nothing of what it remembers of 1 of"):
        optimizer.load_state_dict(saved)
    again = optimizer.state_dict()["state"][0]
    assert all(torch.allclose(again[name], whole[name]) for name in whole if name.endswith((".d", ".e")))
    assert not torch.allclose(whole["adiv_optim.scales.d"], torch.ones(1))


def test_layer_gauge_treats_weights_whose_scales_are_pinned():
    coverage = wrap(mlp(nn.Tanh), gauge=gauge.LayerGauge()).coverage()
    assert coverage.treated == dict.fromkeys(["0.weight", "2.weight", "4.weight"], "layer gauge")
    assert coverage.skipped["0.bias"] == "pinned: tanh in 1"


def measured(optimizer: UnitConsistent) -> dict[str, float]:
    """Its metrics of scales: not what coverage tells, and not what a step did."""
    return {name: value for name, value in optimizer.metrics().items() if not re.search("/treated_|_cosine", name)}


def test_metrics_are_the_range_of_the_scales_measured_last():
    model = mlp()
    optimizer = wrap(model, gauge=gauge.NetworkGauge(every=2))
    assert measured(optimizer) == {}
    graph = gauge.trace(model, torch.ones(2, 6))
    gauge.apply_gauge(model, graph, torch.full((15,), 3.0))
    scales = gauge.network_scales(graph, dict(model.named_parameters()))
    for number in range(3):
        step(model, optimizer)
        if number == 0:
            metrics = measured(optimizer)
    assert metrics == pytest.approx(
        {
            "UnitConsistent/measurements": 1,
            "UnitConsistent/free_scales": 15,
            "UnitConsistent/log_scale_min": float(scales.min()),
            "UnitConsistent/log_scale_max": float(scales.max()),
        }
    )
    assert all(type(value) is float for value in metrics.values())


def test_compiled_by_torch_jit_with_a_graph_of_the_model_it_was_made_of():
    model = mlp()
    twin = copy.deepcopy(model)
    graph = gauge.trace(model, torch.ones(2, 6))
    scripted = torch.jit.trace(model, torch.ones(2, 6))
    step(scripted, UnitConsistent(torch.optim.SGD(scripted.parameters(), lr=0.1), scripted, graph=graph))
    step(twin, UnitConsistent(torch.optim.SGD(twin.parameters(), lr=0.1), twin, graph=graph))
    assert all(torch.equal(*pair) for pair in zip(scripted.parameters(), twin.parameters(), strict=True))
