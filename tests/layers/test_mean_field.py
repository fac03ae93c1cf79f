"""MeanFieldNorm: constants of closed forms."""

import math

import pytest
import torch
from torch import nn

from adiv_optim.layers import MeanFieldNorm
from tests.helpers.covering import paired

CLOSED = 1e-6

SWITCHES = {
    "both": {},
    "center": {"normalize": False},
    "normalize": {"center": False},
    "neither": {"center": False, "normalize": False},
}

#: Activation → mean and variance under a standard normal.
CONSTANTS = {
    "relu": (torch.relu, 1 / math.sqrt(math.tau), 0.5 - 1 / math.tau),
    "exp": (torch.exp, math.sqrt(math.e), math.e**2 - math.e),
}


@paired("constants switches", CONSTANTS, SWITCHES)
def test_output_is_the_activation_less_its_mean_over_its_deviation(constants, switches):
    activation, mean, variance = constants
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    wanted = activation(x)
    wanted = wanted - mean if switches.get("center", True) else wanted
    wanted = wanted / math.sqrt(variance) if switches.get("normalize", True) else wanted
    torch.testing.assert_close(MeanFieldNorm(activation, **switches)(x), wanted, rtol=0, atol=CLOSED)


def test_constants_are_those_of_the_parameters_at_construction():
    prelu = nn.PReLU(init=0.0)
    layer = MeanFieldNorm(prelu)
    assert layer.mean == pytest.approx(MeanFieldNorm(nn.ReLU()).mean, abs=CLOSED)
    prelu.weight.data.fill_(0.9)
    assert layer.mean == pytest.approx(MeanFieldNorm(nn.ReLU()).mean, abs=CLOSED)
    assert MeanFieldNorm(prelu).mean < layer.mean / 2


def test_can_be_built_and_used_on_the_meta_device():
    with torch.device("meta"):
        layer = MeanFieldNorm(nn.ReLU())
        assert layer(torch.empty(3)).shape == (3,)
    assert layer.mean == MeanFieldNorm(nn.ReLU()).mean


def test_repr_names_a_function():
    assert repr(MeanFieldNorm(torch.tanh)).startswith("MeanFieldNorm(tanh, center=True, ")
    assert repr(MeanFieldNorm(nn.Tanh())).startswith("MeanFieldNorm(\n  center=True, ")


def test_activation_without_constants_is_refused():
    with pytest.raises(ValueError, match=r"on chance \(then call .eval\(\) first\)"):
        MeanFieldNorm(nn.Dropout())  # beside others without moments: diagnostics/test_activations.py has a table
    with pytest.raises(ValueError, match="activation is the constant 1, without a variance to divide by"):
        MeanFieldNorm(torch.ones_like)
