"""The result as text and for loggers, layers that are left out, and arguments that are refused."""

import math
import re
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import BatchIdeal, GaussNewton, Proportional, Whitened, attach
from adiv_optim.diagnostics import divergence
from tests.helpers.modules import Model


def model():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))


def batch():
    return torch.randn(6, 4), torch.randint(3, (6,))


def test_steps_at_rate_0_and_of_frozen_parameters_have_no_verdict():
    network = model()
    optimizer = torch.optim.SGD([{"params": network[0].parameters(), "lr": 0.0}, {"params": network[3].parameters()}])
    found = divergence(network, F.cross_entropy, *batch(), optimizer=optimizer)
    assert set(found.layers) == {"3"}
    assert found.left_out["0"] == "its learning rate is 0"
    optimizer.param_groups[1]["lr"] = 0.0
    undecided = divergence(network, F.cross_entropy, *batch(), optimizer=optimizer)
    assert undecided.layers == {}
    assert math.isnan(undecided.descent)
    assert "not downhill" not in str(undecided)
    network[0].requires_grad_(False)
    of_frozen = divergence(network, F.cross_entropy, *batch(), optimizer=torch.optim.SGD(network[0].parameters()))
    assert math.isnan(of_frozen.descent)
    assert of_frozen.left_out["3"] == "the optimizer holds none of its parameters"


def test_loggers_get_the_columns_of_the_table_flat():
    found = divergence(model(), F.cross_entropy, *batch(), Proportional())
    metrics = found.metrics()
    assert metrics["divergence/descent"] == found.descent
    assert metrics["divergence/0/cosine"] == found.layers["0"].cosine.nanmedian().item()
    assert metrics["divergence/3/own gain"] == found.layers["3"].gain.nanmean().item()
    header = [name for name in re.split(r"  +", str(found).splitlines()[0]) if name != "layer"]
    assert [key.split("/")[2] for key in metrics if key.startswith("divergence/0/")] == [*header, "own gain deviation"]


def test_printed_table_has_one_aligned_line_per_layer():
    lines = str(divergence(model(), F.cross_entropy, *batch(), Proportional(), max_rows=2)).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "0", "3", "2:", "Var|x|²:"]
    assert lines[0].index("cosine") + len("cosine") == lines[1].index("2 of 6") + len("2 of 6  ") + len("cosine")
    assert "1 ± " in lines[1]
    assert lines[3] == "2: left out (LayerNorm is left out by default)"


def test_left_out_layers_say_why():
    parts = {"embedding": nn.Embedding(4, 4), "norm": nn.BatchNorm1d(4), "unused": nn.Linear(4, 3)}
    parts |= {"named": nn.Linear(4, 4), "used": nn.Linear(4, 3), "idle": nn.Conv1d(1, 1, 1)}
    uncalled = "it was not called with any rows, the loss does not depend on it, or a reentrant checkpoint hides calls"
    # `idle` is as an expert that no token is sent to.
    odd = Model(lambda m, x: m.used(m.named(input=m.norm(x))) + m.idle(x[:0, None]).sum(), **parts)
    left_out = divergence(odd, F.cross_entropy, *batch()).left_out
    assert left_out == {
        "embedding": "Embedding is left out by default",
        "norm": "BatchNorm1d is left out by default",
        "unused": uncalled,
        "named": "it was not called with tensors alone, by position",
        "idle": uncalled,
    }
    with pytest.raises(ValueError, match=r"layer 'named' \(Linear\) cannot be measured: it was not called with"):
        divergence(odd, F.cross_entropy, *batch(), layers=["named"])


def test_named_layers_are_measured_and_no_other_norms_too():
    found = divergence(model().double(), F.cross_entropy, batch()[0].double(), batch()[1], layers=["3", "2"])
    assert set(found.layers) == {"3", "2"}
    assert found.left_out == {}
    assert found.layers["2"].kind == "LayerNorm"
    assert found.layers["2"].gain.min() > 0


def around(optimizer):
    """An optimizer as Accelerate and Lightning put it around another."""
    outer = torch.optim.SGD(optimizer.param_groups[0]["params"])
    outer.optimizer = optimizer
    return outer


def locked(network):
    optimizer = torch.optim.SGD(network.parameters())
    optimizer.lock = threading.Lock()
    return optimizer


WRONG = {
    "attached-twice": (
        lambda: (attach(model(), Proportional()), BatchIdeal(), {}),
        ValueError, r"layer '0' already has a correction \(2 .*; leave `correction` out",
    ),
    "no-correction": (lambda: (model(), Proportional, {}), TypeError, r"write Proportional\(\)"),
    "max-rows": (lambda: (model(), None, {"max_rows": 0}), ValueError, "max_rows is 0; .* at least 1"),
    "other-model": (
        lambda: (model(), None, {"optimizer": torch.optim.SGD(model().parameters())}),
        ValueError, "none of the 6 tensors the optimizer holds is a parameter of the model",
    ),
    "not-an-optimizer": (lambda: (model(), None, {"optimizer": 3}), TypeError, "optimizer is of type int"),
    "unknown-layer": (lambda: (model(), None, {"layers": ["7"]}), ValueError, "layers names '7'.* modules are "),
    "layers-string": (lambda: (model(), None, {"layers": "0"}), TypeError, r"pass a list of paths: layers=\['0'\]"),
    "no-parameters": (lambda: (nn.Tanh(), None, {}), ValueError, "Tanh has no trainable parameter"),
    "batch-norm-named": (
        lambda: (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), None, {"layers": ["0"]}),
        ValueError, r"layer '0' \(BatchNorm1d\) cannot be measured: BatchNorm1d mixes the samples",
    ),
    "gauss-newton": (
        lambda: (network := model(), None, {"optimizer": GaussNewton(network)}),
        TypeError, "GaussNewton evaluates the loss many times",
    ),
    "of-a-trainer": (
        lambda: (network := model(), None, {"optimizer": around(torch.optim.Adam(network.parameters()))}),
        TypeError, "of type SGD; pass .*optimizer.optimizer of Lightning",
    ),
    "lock": (
        lambda: (Model(lambda model, x: x, layer=nn.Linear(4, 3), lock=threading.Lock()), None, {}),
        ValueError, r"Model cannot be copied .*must not hold locks",
    ),
    "lock-of-optimizer": (lambda: (network := model(), None, {"optimizer": locked(network)}),
        ValueError, r"Sequential or its SGD cannot be copied .*must not hold locks",
    ),
    "optimizer-by-position": (
        lambda: (network := model(), torch.optim.SGD(network.parameters()), {}), TypeError, "by name: optimizer=",
    ),
    "corrected-inside": (
        lambda: (nn.Sequential(attach(model(), Proportional())), None, {"layers": ["0"]}),
        ValueError, "layers inside it have a correction: name those",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_measured_is_refused(make, error, message):
    network, correction, options = make()
    with pytest.raises(error, match=message):
        divergence(network, F.cross_entropy, *batch(), correction, **options)


def test_keyword_arguments_come_as_a_dict():
    """As models of transformers are called."""
    torch.manual_seed(0)
    network = Model(lambda model, values, labels: F.cross_entropy(model.inner(values), labels), inner=nn.Linear(4, 3))
    x, y = batch()
    found = divergence(network, lambda loss, _: loss, {"values": x, "labels": y}, None).layers["inner"]
    wanted = divergence(network.inner, F.cross_entropy, x, y).layers[""]
    for name in ("cosine", "gain", "interference"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))


def test_a_step_without_a_rate_has_no_verdict_in_the_table():
    network = model()
    optimizer = Whitened(torch.optim.SGD(network.parameters(), lr=0.1), network)
    found = divergence(network, F.cross_entropy, *batch(), optimizer=optimizer)
    assert found.optimizer == "Whitened(SGD)"
    undecided = replace(found, layers={path: replace(layer, descent=math.nan) for path, layer in found.layers.items()})
    uphill = replace(found, layers={path: replace(layer, descent=-1.0) for path, layer in found.layers.items()})
    assert "not downhill" not in str(undecided)
    assert str(uphill).count("  not downhill\n") == len(found.layers)
    assert str(uphill).endswith("\nnot downhill: to first order this layer's part of the step does not lower the loss")
    assert repr(found) == str(found)  # what a notebook shows


# torch's own notice: vmap has no batching rule for the backward of weight_norm and loops instead.
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning")
def test_parametrized_layer_is_measured_plain_and_left_out_corrected():
    network = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    plain = divergence(network, F.cross_entropy, *batch())
    assert set(plain.layers["0"].responsibility) == {
        "bias", "parametrizations.weight.original0", "parametrizations.weight.original1"
    }  # fmt: skip
    corrected = divergence(network, F.cross_entropy, *batch(), Proportional())
    assert corrected.left_out["0"].startswith("it is parametrized and corrected")


def weighted(compute, rows=1):
    return Model(compute, weight=nn.Parameter(torch.ones(rows, 6)))


def branch(model, x):
    """Decides by what it reads."""
    return x * model.weight if x.mean().item() > 0 else -x * model.weight


def first(layer):
    return Model(lambda model, x: model.head(model.layer(x))[:8], layer=layer, head=nn.Linear(6, 3))


ONE_BY_ONE = "its rows cannot be differentiated one by one: "


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(("layer", "reason"), [
    (nn.utils.spectral_norm(nn.Linear(6, 6)), "a hook computes its weight before every call"),
    (weighted(lambda model, x: model.weight * x.mean(), 20), ONE_BY_ONE),
    (weighted(branch), ONE_BY_ONE),
])  # fmt: skip
def test_one_layer_that_cannot_be_measured_leaves_the_others(layer, reason):
    model, x, y = first(layer), torch.randn(8, 6), torch.randint(3, (8,))
    found = divergence(model, F.cross_entropy, x, y)
    assert found.left_out["layer"].startswith(reason)
    assert list(found.layers) == ["head"]
    with pytest.raises(ValueError, match=rf"layer 'layer' \({type(layer).__name__}\) cannot be measured: {reason[:9]}"):
        divergence(model, F.cross_entropy, x, y, layers=["layer"])


def test_inputs_of_one_number_a_sample_are_measured():
    model = first(weighted(lambda model, x: x[:, None] * model.weight)).double()
    x, y = torch.randn(8).double(), torch.randint(3, (8,))
    found = divergence(model, F.cross_entropy, x, y).layers["layer"]
    assert torch.allclose(found.squared_norm, x.square())


@pytest.mark.parametrize("by", [None, torch.optim.SGD], ids=["gradient", "optimizer"])
def test_complex_layers_are_left_out_and_descend_all_the_same(by):
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64), nn.Linear(3, 2, dtype=torch.complex64))
    x = torch.randn(5, 4, dtype=torch.complex64)
    optimizer = by and by(model.parameters(), lr=0.1)
    found = divergence(model, lambda z, _: z.abs().square().sum(), x, None, optimizer=optimizer)
    assert found.left_out == dict.fromkeys("01", "it computes with complex numbers, whose rows are not measured")
    model(x).abs().square().sum().backward()
    assert found.descent == pytest.approx(sum(p.grad.abs().square().sum().item() for p in model.parameters()), rel=1e-4)
