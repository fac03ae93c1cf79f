"""Derf against its formula, number by number."""

import math

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from adiv_optim.layers import Derf, convert

pytestmark = pytest.mark.usefixtures("in_float64")


def drawn() -> Derf:
    layer = Derf(3, dim=1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-1, 1)
    return layer


def test_output_is_the_formula():
    layer, x = drawn(), torch.randn(2, 3, 4)
    output, alpha, shift = layer(x), layer.alpha.item(), layer.shift.item()
    for n in range(2):
        for c in range(3):
            for p in range(4):
                inner = math.erf(alpha * x[n, c, p].item() + shift)
                wanted = layer.weight[c].item() * inner + layer.bias[c].item()
                assert output[n, c, p].item() == pytest.approx(wanted, abs=1e-12)


def test_it_starts_at_erf_of_half_the_input():
    x = torch.randn(5, 3)
    assert torch.equal(Derf(3)(x), torch.erf(0.5 * x))
    assert torch.equal(Derf(3, alpha=2.0)(x), torch.erf(2.0 * x))


def test_gradients_are_the_formulas():
    layer = drawn()
    assert gradcheck(layer, torch.randn(2, 3, 4, requires_grad=True))


def test_a_layer_norm_hands_its_parameters_on():
    norm = nn.LayerNorm(3)
    found = convert(nn.Sequential(norm), {nn.LayerNorm: Derf})[0]
    assert found.weight is norm.weight
    assert found.bias is norm.bias


def test_slope_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="Derf: alpha is 0; it must be positive and finite"):
        Derf(3, alpha=0)
