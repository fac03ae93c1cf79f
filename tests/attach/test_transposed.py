"""Corrections on linear layers of other packages that keep their weight transposed, as transformers' Conv1D does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from adiv_optim import BatchIdeal, Disproportional, Preconditioned, Proportional, Whitened, attach, coverage, detach
from adiv_optim.diagnostics import divergence
from adiv_optim.rows import CorrectedAffine, CorrectedLinear, CorrectedTransposed, register
from tests.attach.test_attach import Doubled
from tests.helpers.cases import relative_error

EXACT = 1e-12  # float64, relative


class Conv1D(nn.Module):
    """What transformers.pytorch_utils.Conv1D computes."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class CorrectedConv1D(CorrectedTransposed, Conv1D):
    """As for the real class in adiv_optim/rows/transformers.py."""


pytestmark = pytest.mark.usefixtures("in_float64")
register(Conv1D, CorrectedConv1D)


RULES = [Proportional(), Disproportional(), BatchIdeal(0.1)]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def weighted(output, weights):
    return (output * weights).sum()


def pulled(layer, x, g):
    """Output, and gradients of the input and every parameter."""
    x = x.clone().requires_grad_()
    output = layer(x)
    return output, torch.autograd.grad(output, [x, *layer.parameters()], g)


@each_rule
@pytest.mark.parametrize("shape", [(6,), (2, 3), ()], ids=["rows", "tokens", "one"])
def test_gradients_are_those_of_the_linear_layer_it_is(rule, shape):
    layer, linear, x = Conv1D(3, 4), nn.Linear(4, 3), torch.randn(*shape, 4)
    linear.load_state_dict({"weight": layer.weight.T, "bias": layer.bias})
    output, (plain_input, plain_weight, _) = pulled(layer, x, g := torch.randn(*shape, 3))
    same, found = pulled(attach(layer, rule), x, g)
    assert torch.equal(same, output)
    assert torch.equal(found[0], plain_input)
    _, wanted = pulled(attach(linear, rule), x, g)
    assert relative_error(found[1].T, wanted[1]) <= EXACT
    assert relative_error(found[2], wanted[2]) <= EXACT
    assert relative_error(found[1], plain_weight) > 1e-3
    one, other = (divergence(each, weighted, x, g).layers[""] for each in (layer, linear))
    for name in ("cosine", "projection", "gain", "interference", "squared_norm"):
        assert relative_error(getattr(one, name), getattr(other, name)) <= 1e-9, name
    assert one.kind == "Conv1D"
    plain, also_plain = (divergence(detach(each), weighted, x, g).layers[""] for each in (layer, linear))
    assert relative_error(plain.gain, also_plain.gain) <= EXACT


@pytest.mark.parametrize("wrapper", [Preconditioned, Whitened])
def test_steps_measured_by_inputs_are_those_of_the_linear_layer_it_is(wrapper):
    """Two of one shape, which a step takes together."""
    layers, x = [Conv1D(3, 4), Conv1D(3, 4)], torch.randn(2, 3, 4)
    linears = [nn.Linear(4, 3), nn.Linear(4, 3)]
    for layer, linear in zip(layers, linears, strict=True):
        linear.load_state_dict({"weight": layer.weight.T, "bias": layer.bias})
    starts = [layer.weight.detach().clone() for layer in layers]
    for pair in (layers, linears):
        model = nn.ModuleList(pair)
        optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.1), model, damping=0.1)
        (pair[0](x).square() + pair[1](2 * x).exp()).sum().backward()
        optimizer.step()
    for layer, linear, start in zip(layers, linears, starts, strict=True):
        assert relative_error(layer.weight - start, linear.weight.T - start) <= EXACT
        assert relative_error(layer.bias, linear.bias) <= EXACT
        assert relative_error(-0.1 * layer.weight.grad, layer.weight - start) > 1e-3


def test_attach_copies_and_detach():
    model = attach(nn.Sequential(Conv1D(3, 4), parametrizations.weight_norm(Conv1D(2, 3))), Proportional())
    assert "nf=3, nx=4, correction=Proportional" in repr(model)
    twin = copy.deepcopy(model)
    twin(torch.randn(5, 4)).sum().backward()
    assert len(coverage(twin).treated) == len(list(model.parameters()))
    assert type(detach(twin)[0]) is Conv1D
    assert type(model[0]) is CorrectedConv1D


class Head(nn.Module):
    """A linear layer of another package that is no nn.Linear, and has no bias."""

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, features))
        self.reset_parameters()

    def reset_parameters(self):
        self.weight.data.fill_(7.0)


class CorrectedHead(CorrectedAffine, Head):
    pass


class TransposedHead(Head):
    pass


class CorrectedTransposedHead(CorrectedTransposed, TransposedHead):
    pass


register(Head, CorrectedHead)
register(TransposedHead, CorrectedTransposedHead)


def test_a_registered_layer_keeps_its_own_methods():
    model = attach(nn.Sequential(Head(3)), Proportional())
    model[0].reset_parameters()
    assert "correction=Proportional" in repr(model)
    model(torch.tensor([[1.0, 2.0, 2.0]])).sum().backward()
    assert model(torch.ones(1, 3)).tolist() == [[21.0, 21.0]]
    torch.testing.assert_close(model[0].weight.grad, torch.tensor([[1.0, 2.0, 2.0]] * 2) / 9)
    assert attach(TransposedHead(3), Proportional())(torch.ones(1, 2)).tolist() == [[14.0] * 3]


def test_register_refuses_a_class_that_would_compute_something_else():
    with pytest.raises(TypeError, match="register takes two classes"):
        register(Head, Head(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Conv1D must inherit from CorrectedLinear and from Linear"):
        register(nn.Linear, Conv1D)
    with pytest.raises(TypeError, match=r"CorrectedConv1D must inherit from .* and from Linear"):
        register(nn.Linear, CorrectedConv1D)

    class InOtherOrder(Doubled, CorrectedLinear):
        pass

    with pytest.raises(TypeError, match=r"InOtherOrder must inherit from .*, in that order"):
        register(Doubled, InOtherOrder)

    class WithMethodsOfLinear(CorrectedLinear, Head):
        pass

    with pytest.raises(TypeError, match="must inherit from CorrectedAffine or CorrectedTransposed and from Head"):
        register(Head, WithMethodsOfLinear)
