"""gauge.apply_gauge and network_scales: the function stays, the scales follow the gauge."""

import copy

import pytest
import torch
from torch import nn

from adiv_optim import UnitConsistent, gauge
from adiv_optim.gauge import network
from tests.helpers.cases import relative_error
from tests.helpers.gauge_models import MODELS, mlp

FUNCTION = 1e-10  # relative, float64
SCALES = 1e-12  # absolute, of logarithms
SIGMA = 1.5

pytestmark = pytest.mark.usefixtures("in_float64")


def parameters(model):
    return dict(model.named_parameters())


def scales_of(graph, model, **kwargs):
    return gauge.network_scales(graph, parameters(model), **kwargs)


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_function_stays_and_scales_follow_from_any_start(case):
    model, x = case.model(), case.input()
    graph, before = gauge.trace(model, x), model(x)
    assert graph.free == case.free
    weights, scales = {n: p.clone() for n, p in model.named_parameters()}, scales_of(graph, model)
    t = gauge.random_gauge(graph, SIGMA)
    gauge.apply_gauge(model, graph, t)
    assert relative_error(model(x), before) <= FUNCTION
    assert (scales_of(graph, model, start=gauge.random_gauge(graph, 10.0)) - scales - t).abs().max() <= SCALES
    # Both can fail: the weights did change, and one of them put back is noticed by function and scales.
    moved = [n for n, p in model.named_parameters() if relative_error(p, weights[n]) > 1e-2]
    assert moved == [n for n in weights if graph.parameters[n].moves and weights[n].any()]
    name = [n for n in moved if graph.parameters[n].counted][-1]
    parameters(model)[name].copy_(weights[name])
    assert relative_error(model(x), before) > 1e-3
    assert (scales_of(graph, model) - scales - t).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["convolutions", "block"])
@torch.no_grad()
def test_canonical_is_idempotent_and_undone(name):
    model, x = MODELS[name].model(), MODELS[name].input()
    graph, before = gauge.trace(model, x), model(x)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    taken = gauge.canonical(model, graph)
    assert relative_error(model(x), before) <= FUNCTION
    assert scales_of(graph, model).abs().max() <= SCALES < taken.abs().max()
    gauge.apply_gauge(model, graph, taken)
    assert all(relative_error(p, weights[n]) <= SCALES for n, p in model.named_parameters())


def expected_log_weight(model, name):
    """Mean of log|w| at PyTorch's initialisation, by what the parameter is."""
    owner, weight = model.get_submodule(name.rpartition(".")[0]), parameters(model)[name]
    if isinstance(owner, nn.Embedding):
        return torch.distributions.Normal(0, 1).sample((10**6,)).abs().log().mean().item()
    if weight.dim() < 2 or name.endswith("gain"):
        return 0.0
    drawn = nn.init.kaiming_uniform_(torch.empty(20000, *weight.shape[1:]), a=5**0.5)  # as torch's layers draw
    return drawn.abs().log().mean().item()


def test_expected_magnitudes_are_those_of_pytorch():
    torch.manual_seed(0)
    for name in ("mlp", "convolutions", "block"):
        model = MODELS[name].model()
        graph = gauge.trace(model, MODELS[name].input())
        for name, entry in graph.parameters.items():
            if entry.counted:
                assert entry.expected_log_weight == pytest.approx(expected_log_weight(model, name), abs=0.02)


@torch.no_grad()
def test_zero_initialised_layers_leave_scales_to_the_others():
    model, x = mlp(), torch.randn(3, 6)
    graph = gauge.trace(model, x)
    model[4].weight.zero_()  # 8 → 7: what is left is two chains, one from the input and one to the output
    scales = scales_of(graph, model)
    gauge.apply_gauge(model, graph, -scales)
    assert scales_of(graph, model).abs().max() <= SCALES
    first = nn.Sequential(*model[:4], nn.Linear(8, 7))
    assert not torch.equal(scales[:8], torch.zeros(8))
    balanced = torch.full((4, 7), graph.parameters["6.weight"].expected_log_weight).exp()
    alone = gauge.network_scales(graph, {**parameters(first), "6.weight": balanced, "4.weight": torch.zeros(7, 8)})
    assert alone[-7:].abs().max() <= SCALES  # by those that lead to the output
    for layer in (0, 2, 6):
        model[layer].weight.zero_()
    assert torch.equal(scales_of(graph, model), torch.zeros(graph.free))
    model[0].weight[0, 0] = 3.0
    assert (scales_of(graph, model)[0] - torch.tensor(3.0 * 6**0.5).log() - 1).abs() <= SCALES
    assert not scales_of(graph, model)[1:].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, SCALES), (torch.float32, 1e-5)], ids=str)
@torch.no_grad()
def test_channels_that_zeros_cut_off_have_one_solution_from_any_start(dtype, tolerance):
    widths = ((6, 30), (30, 40), (40, 30), (30, 4))
    model = nn.Sequential(*[part for sizes in widths for part in (nn.Linear(*sizes), nn.ReLU())])
    graph = gauge.trace(model, torch.randn(3, 6))
    model[0].weight.zero_(), model[6].weight.zero_()
    for middle in (model[2], model[4]):
        middle.weight.mul_((5 * torch.randn_like(middle.weight)).exp())
    solution = scales_of(graph, model)
    model = model.to(dtype)
    for start in (solution, (1 + 1e-8) * solution, (1 + 1e-3) * solution):
        assert (scales_of(graph, model, start=start) - solution).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_lower_precision_comes_near_and_its_logarithms_are_taken_in_float32(dtype):
    model = mlp()
    graph, wide = gauge.trace(model, torch.randn(3, 6)), scales_of(gauge.trace(model, torch.randn(3, 6)), model)
    rounded = {n: p.to(dtype) for n, p in model.named_parameters()}
    narrow = gauge.network_scales(graph, rounded)
    assert narrow.dtype == torch.float64
    assert 0 < (narrow - wide).abs().max() <= 30 * torch.finfo(dtype).eps
    exact = gauge.network_scales(graph, {name: p.double() for name, p in rounded.items()})
    assert (narrow - exact).abs().max() <= 1e-4


@torch.no_grad()
def test_mistakes_are_named_and_change_nothing():
    model = mlp()
    graph = gauge.trace(model, torch.randn(3, 6))
    weights = {n: p.clone() for n, p in model.named_parameters()}
    for found, log_scales, message in (
        (model, torch.zeros(3), r"log_scales has shape \(3,\), but the graph has 23 free channels"),
        (model, torch.full((23,), torch.nan), "log_scales holds NaN or inf"),
        (nn.Sequential(nn.Linear(6, 8)), torch.zeros(23), "has '2.weight', which the model has not"),
    ):
        with pytest.raises(ValueError, match=message):
            gauge.apply_gauge(found, graph, log_scales)
    with pytest.raises(TypeError, match=r"takes \(model, graph, log_scales\), found Sequential, Tensor, ChannelGraph"):
        gauge.apply_gauge(model, torch.zeros(23), graph)
    with pytest.raises(TypeError, match=r"graph is a .* tensor of shape \(3, 6\); pass trace's"):
        UnitConsistent(torch.optim.SGD(model.parameters()), model, graph=torch.zeros(3, 6))
    half = copy.deepcopy(model).half()
    with pytest.raises(ValueError, match=r"'0.weight' leaves the range of torch.float16 by these scales; take smaller"):
        gauge.apply_gauge(half, graph, torch.full((23,), 20.0))
    assert all(torch.equal(p, weights[n].half()) for n, p in half.named_parameters())
    with pytest.raises(ValueError, match=r"has '6.weight', which the model has not; trace this"):
        gauge.network_scales(graph, {n: p for n, p in weights.items() if n != "6.weight"})
    for value, what in ((torch.nan, "NaN"), (torch.inf, "inf"), (-torch.inf, "inf")):
        broken = weights["2.weight"].clone()
        broken[0, 0], broken[1, 1] = value, 0.0
        with pytest.raises(ValueError, match=f"'2.weight' holds {what}"):
            gauge.network_scales(graph, {**weights, "2.weight": broken})
    with pytest.raises(ValueError, match=r"2.weight: .* NaN or inf"):
        gauge.LayerGauge().factors(graph, {**weights, "2.weight": broken}, torch.zeros(23))
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def test_scales_beyond_half_precision_leave_what_is_within():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).half()
    graph, before = gauge.trace(model, torch.ones(1, 3).half()), model[2].weight.detach().clone()
    for part in (model[0].weight, model[0].bias, model[2].bias):
        part.data.zero_()  # these would leave it
    gauge.apply_gauge(model, graph, torch.full((graph.free,), 13.0))  # e¹³ is no float16, e¹³ / e¹³ is
    assert torch.equal(model[2].weight, before)


def test_model_of_other_shapes_but_as_many_elements_is_refused():
    def model(layer):
        return nn.Sequential(layer, nn.ReLU(), nn.Conv1d(layer.out_channels, 2, 1))

    graph, other = gauge.trace(model(nn.Conv1d(3, 6, 1, groups=3)), torch.ones(1, 3, 3)), model(nn.Conv1d(3, 2, 1))
    for use in (
        lambda: gauge.apply_gauge(other, graph, torch.ones(graph.free)),
        lambda: gauge.network_scales(graph, parameters(other)),
    ):
        with pytest.raises(ValueError, match=r"'0.weight' has shape .*, but was traced with \(.*; trace again"):
            use()


@torch.no_grad()
def test_weights_whose_logarithms_are_taken_at_once(monkeypatch):
    # Two rows of the first weight are a slice, and the seventh one is left; a row of each other weight is one.
    model = nn.Sequential(nn.Linear(2, 7), nn.ReLU(), nn.Linear(7, 3), nn.ReLU(), nn.Linear(3, 1))
    graph, parameters = gauge.trace(model, torch.randn(1, 2)), dict(model.named_parameters())
    model[0].weight[2, 1] = model[2].weight[1, 4] = 0
    whole = gauge.network_scales(graph, parameters)
    monkeypatch.setattr(network, "WEIGHTS_AT_ONCE", 4)
    assert (gauge.network_scales(graph, parameters) - whole).abs().max() <= 1e-12
