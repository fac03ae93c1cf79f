"""gauge.trace: which channels share a scale, for whole models and one operation at a time."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adiv_optim import BatchIdeal, UnitConsistent, attach, gauge
from adiv_optim.gauge.rules import RULES
from adiv_optim.rows.layers import Corrected
from tests.helpers.cases import relative_error
from tests.helpers.gauge_models import MODELS
from tests.helpers.modules import Model

EXACT = 1e-10
SIGMA = 1.5

pytestmark = pytest.mark.usefixtures("in_float64")


class Around(nn.Module):
    """An operation between two convolutions, whose channels it passes, shares or pins."""

    def __init__(self, function, channels: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(channels, 2, 1)
        self.slope, self.scale = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(1))
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.function = function
        self.takes_module = function.__code__.co_argcount == 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.function(x, self) if self.takes_module else self.function(x))


def add_in_place(x):
    x[:, :2] += x[:, 2:]
    return x


def overwrite(x):
    y = torch.zeros_like(x)
    y[:, :2] = x[:, 2:]
    return y


def in_a_mode(function, mode):
    def run(x, m):
        with mode():
            return function(x) * m.scale

    return run


PASS = {
    "relu": lambda x: x.relu(),
    "prelu": lambda x, m: F.prelu(x, m.slope),
    "clamp-at-zero": lambda x: x.clamp(min=0),
    "max-pool-with-indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "padding-of-rows-of-channels": lambda x: F.pad(x.movedim(1, 3), (0, 0, 1, -1)).movedim(3, 1),
    "other-names": lambda x: torch.clip(x, min=0).absolute().swapdims(2, 3).moveaxis(2, 3) * torch.greater(x, 0),
    "number": lambda x: 3 * x / 2,
    "mean-over-positions": lambda x: x.mean((2, 3), keepdim=True),
    "max-over-positions": lambda x: x.max(3, keepdim=True)[0],
    "permute-and-back": lambda x: x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
    "view-and-back": lambda x: x.view(2, 2, 2, 36).flatten(1, 2).unflatten(2, (6, 6)),
    "stack": lambda x: torch.stack([x[:, 2], x[:, 0], x[:, 1], x[:, 3]], 1),
    "mask-of-nonzeros": lambda x: x.relu() * (x.relu() != 0) + x.relu() * (x == 0),
    "looked-at-in-passing": lambda x: (x.std(), x.isnan().any(), x)[-1],
    "times-a-complex-number": lambda x: (x * (2 + 1j)).abs(),
    "written-over-ones": lambda x, m: x * torch.ones_like(m.slope).mul_(m.slope).sum(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "where-of-two-complex-numbers": lambda x: (x * torch.where(x > 0, 1j, 2 + 0j)).abs(),
    "gate-by-constant": lambda x: x * torch.linspace(-1, 1, 6),
    "instance-norm": lambda x: F.instance_norm(x, eps=0.0),
    "no-grad": in_a_mode(torch.relu, torch.no_grad),
    "autocast": in_a_mode(torch.relu, lambda: torch.autocast("cpu", torch.bfloat16)),
    "reentrant-checkpoint": lambda x, m: checkpoint(in_a_mode(torch.relu, torch.enable_grad), x, m, use_reentrant=True),
}
SHARE = {
    "pairs": (lambda x: x + x.flip(1), 4, 2),
    "difference-of-halves": (lambda x: torch.sub(*x.chunk(2, 1)), 2, 2),
    "in-place-on-a-view": (add_in_place, 4, 2),
    "sum-over-channels": (lambda x: x.sum(1, keepdim=True), 1, 1),
    "concatenation-along-positions": (lambda x: torch.cat([x, x.flip(1)], 3), 4, 2),
    "concatenation-with-a-pinned-one": (lambda x: torch.cat([x[:, :2].tanh(), x], 1), 6, 2),
    "concatenation-of-an-empty-vector": (lambda x: torch.cat([x.new_zeros(0), x], 1), 4, 4),
    "zero-channels": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), 7, 1),
    "per-channel-gain": (lambda x, m: x * m.slope.view(4, 1, 1), 4, 8),
    "gain-of-the-shape-of-what-it-multiplies": (lambda x, m: x * m.slope.view(4, 1, 1).expand_as(x), 4, 8),
    "per-channel-bias": (lambda x, m: x + m.slope[:, None, None], 4, 4),
    "matrix": (lambda x, m: (x.movedim(1, -1) @ m.matrix.t()).movedim(-1, 1), 4, 8),
    "linear-and-back": (lambda x, m: F.linear(x.transpose(1, 3), m.matrix, m.slope).transpose(1, 3), 4, 8),
    "matrix-twice": (lambda x, m: ((x.mT.transpose(1, 3) @ m.matrix) @ m.matrix).transpose(1, 3), 4, 4),
    "matrix-both-ways": (lambda x, m: ((x.movedim(1, 3) @ m.matrix).relu() @ m.matrix.t()).movedim(3, 1), 4, 1),
    "written-into-zeros": (overwrite, 4, 2),
    "tanh-in-autocast": (in_a_mode(torch.tanh, lambda: torch.autocast("cpu", torch.bfloat16)), 4, 1),
    "pooling-across-channels": (lambda x: F.avg_pool2d(x.movedim(1, 3), (1, 2)).movedim(3, 1), 2, 1),
    "quotient-of-halves": (lambda x: x[:, :2] / x[:, 2:], 2, 2),
    "step-with-values-at-zero": (lambda x: x[:, 2:] * torch.heaviside(x[:, :2].relu(), x[:, :2]), 2, 2),
    "one-summand-for-all": (lambda x, m: x + m.scale, 4, 1),
}
PIN = {
    "clamp-at-one": lambda x: x.clamp(0, 1),
    "constant-added": lambda x: x + 1,
    "complex-constant-added": lambda x: (x + 1j).abs(),
    "constant-padding": lambda x: F.pad(x, (1, 1), value=1.0),
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1 / (x.abs() + 1),
    "layer-norm": lambda x: F.layer_norm(x, [4, 6, 6]),
    "normalised-by-constants": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "normalised-by-parameters": lambda x, m: F.batch_norm(x, m.slope.detach(), m.slope.detach()),
    "as-a-matrix-and-a-divisor": lambda x, m: ((x.movedim(1, 3) @ m.matrix) / m.matrix.abs().sum()).movedim(3, 1),
}


def check(model, x, free):
    graph, before = gauge.trace(model, x), model(x)
    assert graph.free == free
    gauge.apply_gauge(model, graph, gauge.random_gauge(graph, SIGMA))
    assert relative_error(model(x), before) <= EXACT
    return graph


def test_rules_are_for_operations_that_torch_has():
    assert not [name for name in RULES if not hasattr(torch.ops.aten, name)]


@pytest.mark.parametrize("function", PASS.values(), ids=PASS)
def test_homogeneous_operation_passes_scales(function):
    check(Around(function), torch.randn(2, 3, 6, 6), 4)


@pytest.mark.parametrize(("function", "channels", "free"), SHARE.values(), ids=SHARE)
def test_operation_carries_and_shares_scales(function, channels, free):
    check(Around(function, channels), torch.randn(2, 3, 6, 6), free)


@pytest.mark.parametrize("function", PIN.values(), ids=PIN)
def test_other_operation_pins_scales(function):
    check(Around(function), torch.randn(2, 3, 6, 6), 0)


CONVOLUTIONS = {
    "transposed-3d": (nn.ConvTranspose3d(4, 6, 2), (2, 3, 2, 2, 2)),
    "unbatched-depthwise": (nn.Conv1d(4, 4, 3, groups=4), (3, 9)),
}


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_every_convolution(layer, shape):
    kind = nn.Conv3d if len(shape) == 5 else nn.Conv1d
    model = nn.Sequential(kind(3, 4, 1), nn.ReLU(), layer, nn.ReLU(), kind(layer.out_channels, 2, 1))
    check(model.double(), torch.randn(shape), 4 + layer.out_channels)


def test_frozen_statistics_and_a_normaliser_without_weights():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, eps=0.0, affine=False), nn.ReLU(), nn.Linear(4, 2)).eval()
    model[1].running_var.uniform_(0.5, 2)
    graph = check(model, torch.randn(6, 3), 4)
    assert set(graph.buffers) == {"1.running_mean", "1.running_var"}


def test_operation_without_a_rule_pins_and_is_named():
    model, x = Around(lambda x: torch.special.i0(x) + torch.erfinv(x.tanh())), torch.randn(2, 3, 6, 6)
    with pytest.warns(UserWarning, match="UnitConsistent treats less .* special_i0") as warned:
        optimizer = UnitConsistent(torch.optim.SGD(model.parameters(), lr=0.1), model, example_input=x)
    assert [warning.filename for warning in warned] == [__file__]
    graph = gauge.trace(model, x)
    assert graph.free == 0
    assert graph.parameters["first.weight"].why == ("special_i0",)
    assert optimizer.coverage().skipped["first.weight"] == "pinned: special_i0"


def test_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(), nn.Linear(4, 2)).train()
    model[2].eval()
    model(torch.randn(5, 3)).sum().backward()
    before, grads = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    gauge.trace(model, torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match="does the model run"):
        gauge.trace(model, torch.ones(5, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(type(value) in (torch.Tensor, nn.Parameter) for value in [*model.parameters(), *model.buffers()])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))


def test_attributes_that_a_first_call_makes_hold_no_tensors_of_the_trace():
    """As rotary tables and kept activations, which made every later gradient a tensor without numbers."""

    def call(model, x):
        if not hasattr(model, "table"):
            model.register_buffer("table", torch.arange(float(x.shape[1])), persistent=False)
        model.seen.append(x)
        return model.last(model.first(x).relu() * model.table[:, None])

    model, x = Model(call, first=nn.Linear(8, 6), last=nn.Linear(6, 2), seen=[]), torch.randn(2, 5, 8)
    before = set(vars(model)), set(model._buffers)
    graph = gauge.trace(model, x)
    assert (set(vars(model)), set(model._buffers), model.seen) == (*before, [])
    assert type(model(x)) is torch.Tensor
    assert gauge.trace(model, x).free == graph.free == 6


def test_wrappers_around_the_model_are_looked_through():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    compiled = torch.compile(model, backend="eager")
    graph, before = gauge.trace(compiled, x), model(x)
    assert graph.free == 4
    assert gauge.apply_gauge(compiled, graph, gauge.random_gauge(graph)) is compiled
    torch.testing.assert_close(model(x), before)


def test_corrected_model_has_the_graph_of_the_plain_one():
    model, x = MODELS["convolutions"].model(), MODELS["convolutions"].input()
    attach(model, BatchIdeal(1e-3))
    assert str(gauge.trace(model, x)) == str(gauge.trace(MODELS["convolutions"].model(), x))
    assert any(isinstance(module, Corrected) for module in model.modules())


def test_arguments_may_be_several_or_named():
    def two(model, x, y):
        return {"out": model.b((model.a(x) + model.a(y)).relu())}

    model, x, y = Model(two, a=nn.Linear(3, 4), b=nn.Linear(4, 1)), torch.randn(2, 3), torch.randn(2, 3)
    assert gauge.trace(model, (x, y)).free == gauge.trace(model, {"x": x, "y": y}).free == 4


DEPENDS_ON_VALUES = Model(lambda model, x: model.layer(x) if x.sum() > 0 else x, layer=nn.Linear(3, 3))
MISTAKES = {
    "wrong-shape": (nn.Linear(4, 2), r"cannot trace Linear with an example_input of shape \(2, 3\), .*RuntimeError"),
    "untraceable": (DEPENDS_ON_VALUES, "torch.export cannot trace Model .*: "),
    "lazy": (nn.LazyLinear(3), "'weight' of the model itself .* has no shape yet"),
}


@pytest.mark.parametrize(("model", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(model, message):
    with pytest.raises(ValueError, match=message):
        gauge.trace(model, torch.ones(2, 3))


def test_random_gauge_is_log_normal():
    graph = gauge.trace(nn.Sequential(nn.Linear(1, 4000), nn.ReLU(), nn.Linear(4000, 1)), torch.ones(1, 1))
    draws = [gauge.random_gauge(graph, 1.5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert math.isclose(draws[0].std(), 1.5, rel_tol=0.05)  # 4.5 standard errors
    for sigma in (-1.0, math.nan):
        with pytest.raises(ValueError, match="sigma is"):
            gauge.random_gauge(graph, sigma)


def test_tied_weights_stand_under_their_first_name():
    model = nn.ModuleDict({"first": nn.Linear(4, 4, bias=False), "second": nn.Linear(4, 4, bias=False)})
    model.forward = lambda x: model["second"](x).relu()
    model["second"].weight = model["first"].weight
    graph = gauge.trace(model, torch.ones(2, 4))
    assert set(graph.parameters) == {"first.weight"}
    assert not graph.unused


@pytest.mark.parametrize(
    "remake",
    [torch.fx.symbolic_trace, lambda model: torch.export.export(model, (torch.randn(2, 3),)).module()],
    ids=["fx", "exported"],
)
def test_traced_by_others_is_the_model(remake):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3)
    wanted, remade = gauge.trace(model, x), gauge.trace(remake(model), x)
    assert str(remade) == str(wanted)
    assert list(remade.parameters) == list(wanted.parameters)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("config", "model"), [("GPT2Config", "GPT2LMHeadModel"), ("LlamaConfig", "LlamaForCausalLM")], ids=["gpt2", "llama"]
)
def test_decoders_of_transformers_without_their_cache(config, model):
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 11}
    config = getattr(transformers, config)(**sizes, bos_token_id=0, eos_token_id=0)
    model = getattr(transformers, model)(config).eval()
    tokens = torch.randint(11, (2, 5))
    graph, before = gauge.trace(model, {"input_ids": tokens, "use_cache": False}), model(tokens)
    gauge.apply_gauge(model, graph, gauge.random_gauge(graph, 1.5))
    assert graph.free >= 2 * 8  # the values
    assert relative_error(model(tokens).logits, before.logits) <= 1e-10


def test_outputs_that_torch_export_does_not_know_are_refused():
    model = Model(lambda model, x: SimpleNamespace(hidden=model.layer(x)), layer=nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"return tensors alone \(of transformers with use_cache=False\)"):
        gauge.trace(model, torch.randn(2, 3))
