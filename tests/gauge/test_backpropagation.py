"""uc_linear and uc_backpropagation: W'ᵀ in the backward chain, against explicit products and other gauges."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from adiv_optim import Proportional, UnitConsistent, attach, gauge
from adiv_optim.gauge import uc_backpropagation, uc_linear
from tests.helpers.cases import relative_error

pytestmark = pytest.mark.usefixtures("in_float64")
EXACT = 1e-12


@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 3, 5)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_backward_is_the_formula(shape, with_bias):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    bias = torch.randn(4, requires_grad=True) if with_bias else None
    output = uc_linear(x, weight, bias)
    assert torch.equal(output, F.linear(x, weight, bias))
    g = torch.randn_like(output)
    output.backward(g)
    d, canonical, _ = gauge.rz_scaling(weight)
    assert relative_error(x.grad, g @ canonical) <= EXACT
    assert relative_error(weight.grad, (g / d).reshape(-1, 4).mT @ x.detach().reshape(-1, 5)) <= EXACT
    if with_bias:
        assert relative_error(bias.grad, (g / d).reshape(-1, 4).sum(0)) <= EXACT
    assert relative_error(x.grad, g @ weight) > 1e-2  # torch's own


def test_scales_beyond_float16_do_not_overflow_in_its_gradients():
    layer, x = nn.Linear(4, 3).float(), torch.randn(5, 4, dtype=torch.float32)
    with torch.no_grad():
        layer.weight[0].mul_(1e-6)  # of which 1/D is 10⁶
    gradients = []
    for enabled in (False, True):
        with uc_backpropagation(layer), torch.autocast("cpu", torch.float16, enabled=enabled):
            output = layer(x)
        gradients += torch.autograd.grad(output, layer.weight, torch.full_like(output, 1e-3))
    plain, low = gradients
    assert relative_error(low, plain) < 1e-2
    assert plain[0].abs().max() > 100 * plain[1:].abs().max()


def test_vmap_is_a_loop():
    weight, x = torch.randn(4, 5), torch.randn(3, 2, 5)

    def gradient(x):
        return torch.func.grad(lambda x: uc_linear(x, weight).square().sum())(x)

    assert relative_error(torch.func.vmap(gradient)(x), torch.stack([gradient(row) for row in x])) <= EXACT


def chain(groups=2):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=groups), nn.LeakyReLU(), nn.Flatten(),
        nn.Linear(6 * 16, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def signals(model, x, y):
    """What arrives at the output of every layer with weights."""
    values = [x]
    for layer in model:
        values.append(layer(values[-1]))
    outputs = [value for layer, value in zip(model, values[1:], strict=True) if hasattr(layer, "weight")]
    return torch.autograd.grad(F.cross_entropy(values[-1], y), outputs)


def test_signals_are_the_same_in_every_gauge():
    model, x, y = chain(), torch.randn(5, 3, 8, 8), torch.randint(3, (5,))
    graph = gauge.trace(model, x)
    other = gauge.apply_gauge(copy.deepcopy(model), graph, gauge.random_gauge(graph, 1.5))

    def worst():
        return max(relative_error(a, b) for a, b in zip(signals(other, x, y), signals(model, x, y), strict=True))

    assert worst() > 1e-1
    with uc_backpropagation(model), uc_backpropagation(other):
        assert worst() <= 1e-10


def test_attached_composes_copies_is_traced_as_the_plain_one_and_comes_off():
    model, x, y = chain(), torch.randn(5, 3, 8, 8), torch.randint(3, (5,))
    plain = signals(copy.deepcopy(model), x, y)
    with uc_backpropagation(model) as handle:
        changed = signals(model, x, y)
        assert relative_error(changed[0], plain[0]) > 1e-2
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for a, b in zip(signals(copied, x, y), changed, strict=True):
                assert torch.equal(a, b)
        graph = gauge.trace(model, x)
        assert str(graph) == str(gauge.trace(chain(), x))
        optimizer = UnitConsistent(torch.optim.Adam(model.parameters()), model, graph=graph)
        attach(model, Proportional())
        optimizer.step()
    handle.remove()  # twice is once
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model)


def test_an_activation_may_write_in_place():
    models = [nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=inplace), nn.Linear(4, 2)) for inplace in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    x, gradients = torch.randn(5, 3), []
    for model in models:
        with uc_backpropagation(model):
            gradients.append(torch.autograd.grad(model(x).square().sum(), [*model.parameters()]))
    assert all(map(torch.equal, *gradients))
    assert torch.equal(uc_linear(x, models[0][0].weight).relu_(), (x @ models[0][0].weight.T).relu())


class Renaming(nn.Linear):
    def forward(self, hidden_states, scale=1.0):
        return scale * super().forward(hidden_states)


class PassingOn(nn.Linear):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_input_by_name_and_no_grad():
    for layer, names in ((Renaming(3, 2), ("scale", "hidden_states")), (PassingOn(3, 2), ("input",))):
        x = torch.randn(4, 3, requires_grad=True)
        uc_backpropagation(layer)
        layer(**{name: x if name != "scale" else 1.0 for name in names}).sum().backward()
        assert relative_error(x.grad, torch.ones(4, 2) @ gauge.rz_scaling(layer.weight).canonical) <= EXACT
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan  # it has no scales, and without a gradient needs none
        assert not layer(x).requires_grad


def test_a_weight_that_changes_with_each_use_is_computed_once():
    """As of spectral norm, of which each use is a step of the power iteration."""
    layers = []
    for through_adjoint in (False, True):
        torch.manual_seed(0)
        layers.append(parametrizations.spectral_norm(nn.Linear(4, 3)))
        if through_adjoint:
            uc_backpropagation(layers[1])
        layers[-1].parametrizations.weight.original.data.mul_(torch.arange(4.0))
    x = torch.randn(5, 4)
    assert torch.equal(layers[1](x), layers[0](x))
    assert torch.equal(layers[1].parametrizations.weight[0]._u, layers[0].parametrizations.weight[0]._u)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layers[1](torch.randn(5, 3))
    assert not parametrize._cache_enabled


MISTAKES = {
    "found modules of type ReLU": lambda: uc_backpropagation(nn.ReLU()),
    "found modules of type MultiheadAttention": lambda: uc_backpropagation(nn.MultiheadAttention(4, 2)),
    "are NaN or inf": lambda: uc_linear(torch.ones(2), torch.tensor([[torch.nan, 1.0]])),
    "layer '0' has it already": lambda: [*map(uc_backpropagation, [nn.Sequential(nn.Linear(2, 2))] * 2)],
}


@pytest.mark.parametrize(("message", "action"), MISTAKES.items(), ids=MISTAKES)
def test_mistakes_are_named(message, action):
    """A second set of hooks would scale by D⁻² and E⁻² without a word."""
    with pytest.raises(ValueError, match=message):
        action()
