"""Moments, Hermite coefficients and strengths of activations are those of closed forms; float64."""

import math

import pytest
import torch
from torch import nn

from adiv_optim.diagnostics import gaussian_moments, hermite_coefficients, isometry_strength
from adiv_optim.diagnostics.activations import NODES, WEIGHTS

CLOSED = 1e-6

pytestmark = pytest.mark.usefixtures("in_float64")


def leaky(a):
    return 2 - ((1 + a) / 2) ** 2 / ((1 + a**2) / 2 - (1 - a) ** 2 / math.tau)


CLOSED_FORMS = {
    "relu": (torch.relu, 2 - math.pi / (2 * (math.pi - 1))),
    "identity": (nn.Identity(), 1.0),
    "absolute": (torch.abs, 2.0),
    **{f"leaky-{a}": (nn.LeakyReLU(a), leaky(a)) for a in (-0.3, 0.0, 0.01, 0.2, 0.5, 0.99, 3.0)},
    **{f"exp-{a}": (lambda z, a=a: (a * z).exp(), 2 - a**2 / math.expm1(a**2)) for a in (-1.5, 0.01, 0.5, 1.0, 4.0)},
    **{f"sin-{a}": (lambda z, a=a: (a * z).sin(), 2 - a**2 / math.sinh(a**2)) for a in (0.01, 0.5, 1.0, 2.0, 5.0)},
}


@pytest.mark.parametrize(("activation", "wanted"), CLOSED_FORMS.values(), ids=CLOSED_FORMS)
def test_strength_is_the_closed_form(activation, wanted):
    assert isometry_strength(activation) == pytest.approx(wanted, rel=0, abs=CLOSED)


@pytest.mark.parametrize("degree", range(0, 40, 2))
def test_rule_of_twenty_nodes_is_exact_up_to_degree_39(degree):
    integral = (WEIGHTS * NODES**degree).sum().item()
    assert integral == pytest.approx(2 / (degree + 1), rel=1e-14)
    assert abs((WEIGHTS * NODES ** (degree + 1)).sum().item()) < 1e-16


def density(a):
    return math.exp(-(a**2) / 2) / math.sqrt(math.tau)


def above(a):
    return math.erfc(a / math.sqrt(2)) / 2


@pytest.mark.parametrize("a", [-2.0, 0.0, 0.1, math.pi / 3, 4.7], ids=str)
def test_kinks_and_jumps_are_found_wherever_they_are(a):
    hinge = gaussian_moments(lambda z: (z - a).relu())
    mean = density(a) - a * above(a)
    assert hinge.mean == pytest.approx(mean, rel=0, abs=CLOSED)
    assert hinge.slope == pytest.approx(above(a), rel=0, abs=CLOSED)
    second = (1 + a**2) * above(a) - a * density(a)
    assert hinge.variance == pytest.approx(second - mean**2, rel=0, abs=CLOSED)
    jump = gaussian_moments(lambda z: z > a)
    assert jump.mean == pytest.approx(above(a), rel=0, abs=CLOSED)
    assert jump.slope == pytest.approx(density(a), rel=0, abs=CLOSED)
    assert jump.variance == pytest.approx(above(a) * (1 - above(a)), rel=0, abs=CLOSED)


def test_steep_and_stepped_functions():
    assert gaussian_moments(lambda z: torch.sigmoid(1e6 * (z - 0.3))).mean == pytest.approx(above(0.3), abs=CLOSED)
    steps = [k / 8 for k in range(-80, 81)]
    wanted = sum(above(a) for a in steps) / 8 - 81 / 8
    assert gaussian_moments(lambda z: (8 * z).floor() / 8).mean == pytest.approx(wanted, abs=CLOSED)


def test_variance_of_a_function_far_from_zero_keeps_its_digits():
    assert isometry_strength(lambda z: 1e5 + z.relu()) == pytest.approx(isometry_strength(torch.relu), abs=CLOSED)


def test_hermite_coefficients_of_relu():
    """He_{k−2}(0) / √(2π k!) from k = 2 on, by two integrations by parts; the odd ones are 0."""
    found, wanted = hermite_coefficients(torch.relu, 300), torch.zeros(301)
    wanted[:3] = torch.tensor([density(0), 0.5, density(0) / math.sqrt(2)])
    for k in range(2, 300, 2):
        wanted[k + 2] = -(k - 1) / math.sqrt((k + 1) * (k + 2)) * wanted[k]
    torch.testing.assert_close(found, wanted, rtol=0, atol=CLOSED)
    assert wanted[300].abs() > 10 * CLOSED  # the last one is still told from zero


def test_hermite_coefficients_of_polynomials():
    cubic = hermite_coefficients(lambda z: z**3, 5)
    torch.testing.assert_close(cubic, torch.tensor([0, 3, 0, math.sqrt(6), 0, 0]), rtol=0, atol=CLOSED)
    assert hermite_coefficients(torch.exp, 0).shape == (1,)


def test_modules_are_left_as_they_are_and_may_work_in_place():
    module = nn.PReLU(init=0.2, dtype=torch.float32)
    before = module.weight.detach().clone()
    assert isometry_strength(module) == pytest.approx(leaky(before.item()), abs=CLOSED)
    assert torch.equal(module.weight, before)
    assert (module.weight.dtype, module.weight.grad) == (torch.float32, None)
    assert isometry_strength(nn.ReLU(inplace=True)) == isometry_strength(nn.ReLU())
    assert isometry_strength(torch.tanh_) == isometry_strength(torch.tanh)


ERRORS = {
    "class": (torch.nn.ReLU, TypeError, "activation is <class '.*ReLU'>; pass an elementwise module or function"),
    "name": ("relu", TypeError, "activation is 'relu'; pass an elementwise module or function"),
    "softmax": (nn.Softmax(dim=-1), ValueError, "depends for one number on the other"),
    "linear": (nn.Linear(3, 3), ValueError, "for tensors of any shape: mat1 and mat2 shapes cannot be"),
    "glu": (nn.GLU(dim=0), ValueError, "its output has another shape than its input"),
    "dropout": (nn.Dropout(), ValueError, r"or on chance \(then call .eval\(\) first\)"),
    "logarithm": (torch.log, ValueError, "gives nan at z = .*; it must be finite for every z"),
    "too-steep": (lambda z: (z * z / 4).exp(), ValueError, "no finite variance.*slower than exp"),
    "pole": (torch.reciprocal, ValueError, "moments of reciprocal .* do not settle: its variance is infinite"),
}


@pytest.mark.parametrize(("activation", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_what_has_no_strength_is_refused(activation, error, message):
    for function in (isometry_strength, gaussian_moments, lambda f: hermite_coefficients(f, 3)):
        with pytest.raises(error, match=message):
            function(activation)


def test_integrable_neighbours_of_the_refused_are_not():
    assert gaussian_moments(lambda z: (z * z / 8).exp()).mean == pytest.approx(math.sqrt(4 / 3), abs=CLOSED)
    root = gaussian_moments(lambda z: z.abs() ** -0.25)
    assert root.mean == pytest.approx(2**-0.125 * math.gamma(3 / 8) / math.sqrt(math.pi), abs=CLOSED)
    assert isometry_strength(nn.RReLU().eval()) == pytest.approx(leaky((1 / 8 + 1 / 3) / 2), abs=CLOSED)


def test_constant_has_moments_but_no_strength():
    assert gaussian_moments(torch.ones_like).is_constant
    assert not gaussian_moments(lambda z: 1 + 1e-9 * z).is_constant
    with pytest.raises(ValueError, match="activation is the constant 1: all samples become one"):
        isometry_strength(torch.ones_like)
    for degree in (-1, 2.0):
        with pytest.raises(ValueError, match=f"degree is {degree}; .* a whole number from 0"):
            hermite_coefficients(torch.relu, degree)
