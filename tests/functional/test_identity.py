"""What a correction must not change: the forward pass and the gradient of the input; and nothing at all for None."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from adiv_optim import Disproportional, Proportional, functional
from tests.helpers.cases import LAYERS, apply, each_functional_layer, gradients


@each_functional_layer
def test_output_and_input_gradient_are_torchs_bit_for_bit_and_without_a_correction_all_gradients(case):
    layer, x = case.layer(torch.float32), case.input(torch.float32).requires_grad_()
    plain, output, uncorrected = layer(x), apply(layer, x, Proportional()), apply(layer, x, None)
    assert torch.equal(output, plain)
    assert torch.equal(uncorrected, plain)
    g = torch.randn_like(plain)
    (wanted,) = torch.autograd.grad(plain, x, g, retain_graph=True)
    (alone,) = torch.autograd.grad(output, x, g, retain_graph=True)
    output.backward(g)  # with everything trained
    assert torch.equal(alone, wanted)
    assert torch.equal(x.grad, wanted)
    by_torch, found = gradients(plain, layer, g), gradients(uncorrected, layer, g)
    assert found.keys() == by_torch.keys()
    for name in by_torch:
        assert torch.equal(found[name], by_torch[name]), name


GRADCHECK_LINEAR = {"rows": (3, 4), "tokens": (2, 2, 4), "unbatched": (4,)}


@pytest.mark.parametrize("shape", GRADCHECK_LINEAR.values(), ids=GRADCHECK_LINEAR)
def test_linear_without_correction_passes_gradcheck(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(functional.linear, (x, weight, bias))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_without_correction_passes_gradcheck(dims):
    function = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[dims]
    x = torch.randn(1, 2, *(3,) * dims, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 1, *(2,) * dims, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, w, b: function(x, w, b, 2, 1, 1, 2), (x, weight, bias))


@pytest.mark.parametrize("name", ["linear-tokens", "conv1d-unbatched", "conv2d-every-option", "conv3d"])
def test_input_gradient_passes_gradcheck_with_a_correction(name):
    case, correction = LAYERS[name], Disproportional()
    layer, x = case.layer().requires_grad_(False), case.input().requires_grad_()
    assert gradcheck(lambda x: apply(layer, x, correction), (x,), fast_mode=True)


def test_frozen_layer_has_no_gradient_and_passes_the_inputs():
    layer = torch.nn.Linear(3, 2).double().requires_grad_(False)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    apply(layer, x, Proportional()).sum().backward()
    assert torch.equal(x.grad, layer.weight.sum(0).expand(4, 3))
    assert layer.weight.grad is None
    assert layer.bias.grad is None


def test_nothing_to_differentiate_gives_a_constant():
    layer = torch.nn.Linear(3, 2).requires_grad_(False)
    assert not apply(layer, torch.randn(4, 3), Proportional()).requires_grad


LAYOUTS = {
    "column-major": ((33, 70), (1, 0)),
    "one-column": ((40, 1), (1, 0)),
    "tokens-column-major": ((4, 17, 30), (2, 0, 1)),
    "tokens-across": ((4, 17, 30), (1, 0, 2)),
    "one-sample": ((1, 17, 30), (0, 2, 1)),
    "four-dimensions": ((2, 1, 9, 20), (3, 0, 1, 2)),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("shape", "order"), LAYOUTS.values(), ids=LAYOUTS)
def test_input_gradient_is_bit_identical_however_the_input_lies(shape, order, bias):
    """torch multiplies the gradient of a column-major input the other way round, which rounds differently."""
    places = [order.index(dim) for dim in range(len(order))]
    x = torch.randn([shape[dim] for dim in order]).permute(places).requires_grad_()
    layer = torch.nn.Linear(shape[-1], 13, bias=bias)
    assert x.shape == shape
    g = torch.randn(*shape[:-1], 13)
    for grad_output in (g, g[..., :1].expand_as(g)):
        found, wanted = (
            torch.autograd.grad(apply(layer, x, rule), x, grad_output)[0] for rule in (Proportional(), None)
        )
        assert torch.equal(found, wanted)


def test_non_contiguous_input_gives_torchs_output():
    x = torch.randn(5, 4, 3, dtype=torch.float64).permute(1, 2, 0)
    layer = torch.nn.Linear(5, 2).double()
    twin = copy.deepcopy(layer)
    assert torch.equal(apply(layer, x, None), F.linear(x, twin.weight, twin.bias))
