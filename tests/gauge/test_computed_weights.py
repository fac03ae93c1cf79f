"""gauge.trace of weights that a network computes from others."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from adiv_optim import UnitConsistent, gauge
from adiv_optim.gauge import tracing
from tests.functional.test_memory import Largest
from tests.gauge.test_trace import check
from tests.gauge.test_unit_consistent_paths import deviation
from tests.helpers.modules import Model
from tests.helpers.steps import sgd, stepped

pytestmark = pytest.mark.usefixtures("in_float64")


class Standardised(nn.Conv2d):
    """A convolution whose weight's rows are brought to mean 0 and variance 1 by batch_norm, as timm's are."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True, eps=1e-30).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def test_rows_of_standardised_weights_are_free():
    model = nn.Sequential(Standardised(3, 6, 3), nn.ReLU(), Standardised(6, 4, 1))
    check(model, torch.randn(2, 3, 8, 8), 6 + 4)


def path_deviation(model: nn.Module, x: Tensor, rule: gauge.NetworkGauge) -> float:
    """How far three steps on a model and on its like in another gauge come apart."""
    graph = gauge.trace(model, x)
    scales = gauge.random_gauge(graph, 1.0, generator=torch.Generator().manual_seed(0))
    other = gauge.apply_gauge(copy.deepcopy(model), graph, scales)
    for each in (model, other):
        stepped(each, UnitConsistent(sgd(each, 1e-2), each, graph=graph, gauge=rule), x, x, x)
    return deviation(model, other, graph, scales)


def gained() -> nn.Module:
    """Gains that are no matrices, though they have more than one dimension or none, and a matrix in three."""

    def with_gains(model: Model, x: Tensor) -> Tensor:
        x = (model.first(x)[:, None] * model.gain).relu()
        return model.last((x @ model.matrix[0]).relu()) * (2 * model.sharpness)

    numbers = {"gain": torch.rand(1, 1, 4) + 0.5, "matrix": torch.randn(1, 4, 4), "sharpness": torch.tensor(1.5)}
    parameters = {name: nn.Parameter(value) for name, value in numbers.items()}
    return Model(with_gains, first=nn.Linear(3, 4), last=nn.Linear(4, 2), **parameters)


def tied() -> nn.Module:
    """A matrix and its transpose, whose inputs and outputs share one scale."""

    def both_ways(model: Model, x: Tensor) -> Tensor:
        return model.last((F.relu(model.first(x)) @ model.matrix).relu() @ model.matrix.t())

    return Model(both_ways, first=nn.Linear(3, 4), last=nn.Linear(4, 2), matrix=nn.Parameter(torch.randn(4, 4)))


def weight_normed() -> nn.Module:
    """A weight that an operation without a rule computes, before four free channels."""
    return nn.Sequential(weight_norm(nn.Linear(3, 6)), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def test_weights_of_weight_norm_are_pinned_and_named():
    model, x = weight_normed(), torch.randn(5, 3)
    opt = UnitConsistent(torch.optim.SGD(model.parameters(), lr=0.1), model, graph=check(model, x, 4))
    skipped = opt.coverage().skipped
    for name in ("original0", "original1"):
        assert skipped[f"0.parametrizations.weight.{name}"] == "pinned: _weight_norm in 0.parametrizations.weight.0"
    assert list(opt.coverage().treated) == ["2.weight", "2.bias", "4.weight"]


@pytest.mark.filterwarnings("ignore:UnitConsistent treats")  # little of some, but that rightly
@pytest.mark.parametrize("rule", [gauge.NetworkGauge(), gauge.LayerGauge()], ids=["network", "layer"])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Sequential(Standardised(3, 6, 3), nn.ReLU(), Standardised(6, 4, 1)), (2, 3, 6, 6)),
        (gained, (5, 3)),
        (tied, (5, 3)),
        (weight_normed, (5, 3)),
    ],
    ids=["standardised", "gains", "both-ways", "weight-norm"],
)
def test_equivalent_networks_follow_one_path(build, shape, rule):
    torch.manual_seed(0)
    assert path_deviation(build(), torch.randn(shape), rule) <= 1e-10


@pytest.mark.parametrize(
    "computed", [lambda w, m: m * w, lambda w, m: w * m, lambda w, m: 0.5 * w, lambda w, m: w / 2], ids=range(4)
)
def test_masked_and_scaled_weights_keep_the_scales_of_their_channels(computed):
    def call(model: Model, x: Tensor) -> Tensor:
        return model.second(F.relu(F.linear(x, computed(model.first.weight, model.mask), model.first.bias)))

    model = Model(call, first=nn.Linear(6, 8), second=nn.Linear(8, 5), mask=nn.Buffer(torch.ones(8, 6).triu()))
    assert check(model, torch.randn(4, 6), 8).parameters["first.weight"].moves


def tied_by_data():
    first, last = nn.Linear(6, 4), nn.Linear(4, 6)
    last.weight = nn.Parameter(first.weight.t())
    return nn.Sequential(first, nn.ReLU(), last)


def overwritten_in_a_region(model, x):
    h = model.first(x).relu()
    with torch.enable_grad():
        h[:, :2] = h[:, 2:].tanh()
    return model.last(h)


def of_integers():
    whole = nn.Parameter(torch.randint(-8, 8, (4, 6), dtype=torch.int8), requires_grad=False)
    return Model(lambda m, x: m.last(F.linear(x, m.whole.to(x.dtype)).relu()), whole=whole, last=nn.Linear(4, 2))


def with_statistics_read_twice():
    def call(m: Model, x: Tensor) -> Tensor:
        return m.last(m.norm(m.first(x)).relu()) * m.norm.running_var.mean()

    norm = nn.BatchNorm1d(4, eps=1e-30)
    norm.running_var.uniform_(0.5, 2)
    return Model(call, first=nn.Linear(6, 4), norm=norm, last=nn.Linear(4, 2)).eval()


def with_statistics_returned():
    model = with_statistics_read_twice()
    model.compute = lambda m, x: torch.cat([m.last(m.norm(m.first(x)).relu()), m.norm.running_mean[None, :2]])
    return model


def with_a_buffer_in_its_memory():
    model = Model(lambda m, x: m.last(m.first(x).relu()) + F.linear(x[:, :4], m.copy), **first_and_last())
    model.register_buffer("copy", model.last.weight.data)
    return model


def out_into_a_view(model, x):
    with torch.no_grad():
        whole = x.new_empty(len(x), 4)
        torch.mul(model.first(x)[:, :2], 2, out=whole[:, :2])
        torch.clamp(model.first(x)[:, 2:], min=0, out=whole[:, 2:])
    return model.last(whole)


def first_and_last():
    return {"first": nn.Linear(6, 4), "last": nn.Linear(4, 2)}


@pytest.mark.parametrize(
    "build",
    [
        tied_by_data, of_integers, with_statistics_read_twice, with_statistics_returned, with_a_buffer_in_its_memory,
        lambda: Model(out_into_a_view, **first_and_last()),
        lambda: Model(overwritten_in_a_region, first=nn.Linear(6, 4), last=nn.Linear(4, 2)),
    ],
    ids=["tied-by-data", "integers", "statistics", "returned", "buffer", "out", "region"],
)  # fmt: skip
def test_a_gauge_leaves_the_function_where_a_parameter_or_buffer_is_used_otherwise_too(build):
    torch.manual_seed(0)
    model, x = build(), torch.randn(5, 6)
    graph, before = gauge.trace(model, x), model(x)
    gauge.apply_gauge(model, graph, gauge.random_gauge(graph))
    assert (model(x) - before).abs().max() <= 1e-10 * before.abs().max()


def test_elements_of_a_parameter_that_the_traced_call_leaves_out_stay_as_they_are():
    parts = {"first": nn.Linear(6, 4), "positions": nn.Parameter(torch.randn(9, 4)), "last": nn.Linear(4, 2)}
    model = Model(lambda m, x: m.last((m.first(x) + m.positions[: len(x)]).relu()), **parts)
    x, before = torch.randn(5, 6), model.positions.detach().clone()
    graph, output = gauge.trace(model, x), model(x)
    assert graph.free == 4
    gauge.apply_gauge(model, graph, gauge.random_gauge(graph))
    assert torch.allclose(model(x), output)
    assert torch.equal(model.positions[5:], before[5:])
    assert not torch.isclose(model.positions[:5], before[:5]).any()


def test_a_concatenation_costs_no_memory_of_the_activations_size(monkeypatch):
    def joined(model: Model, x: Tensor) -> Tensor:
        x = F.relu(model.first(x))
        return model.second(torch.cat([x, x], 1))

    model = Model(joined, first=nn.Conv2d(3, 4, 3, padding=1), second=nn.Conv2d(8, 2, 1))
    example = torch.randn(4, 3, 64, 64)
    program = tracing._exported(model, example)
    monkeypatch.setattr(tracing, "_exported", lambda *_: program)
    with Largest() as recorder:
        assert gauge.trace(model, example).free == 4
    assert recorder.numel < 1000
