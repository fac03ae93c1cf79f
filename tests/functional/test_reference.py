"""The fast path against two independent references: a Python loop over rows, and explicit torch.func Jacobians."""

from dataclasses import dataclass

import pytest
import torch

from adiv_optim import Correction, Disproportional, Proportional, jacobian
from tests.helpers.cases import FUNCTIONAL, LAYERS, apply, each_correction, gradients, quiet_same, relative_error
from tests.helpers.references import loop_gradients

EXACT = 1e-12  # float64, relative
VISIBLE = 1e-2  # what a wrong scale must exceed
#: One of every code path.
SOME = ["linear-rows", "linear-tokens", "linear-narrow-to-wide", "linear-rows-no-bias", "conv2d", "conv2d-groups"]


def fast_and_grad_output(layer, x, correction):
    output = apply(layer, x, correction)
    g = torch.randn_like(output)
    return gradients(output, layer, g), g


def oracle_gradients(layer, x, g, correction):
    return jacobian.corrected_gradients(layer, lambda output, g: (output * g).sum(), x, g, correction)


#: Weight and bias of Disproportional have scales of their own, those of Proportional share one.
RULES = [
    *(pytest.param(case, Disproportional(), id=name) for name, case in FUNCTIONAL.items()),
    *(pytest.param(LAYERS[name], Proportional(), id=f"{name}-shared") for name in SOME),
]


@quiet_same
@pytest.mark.parametrize(("case", "correction"), RULES)
def test_fast_path_is_the_loop_over_rows_and_the_torch_func_oracle(case, correction):
    layer, x = case.layer(), case.input()
    found, g = fast_and_grad_output(layer, x, correction)
    for wanted in (loop_gradients(layer, x, g, correction), oracle_gradients(layer, x, g, correction)):
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert relative_error(found[name], wanted[name]) <= EXACT, name


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", ["linear-rows", "linear-narrow-to-wide", "conv2d-every-option", "conv1d-unbatched"])
@each_correction
def test_frozen_parameter_is_left_out_of_the_divergence(name, frozen, correction):
    case = LAYERS[name]
    layer, x = case.layer(), case.input()
    getattr(layer, frozen).requires_grad_(False)
    found, g = fast_and_grad_output(layer, x, correction)
    by_loop, by_oracle = loop_gradients(layer, x, g, correction), oracle_gradients(layer, x, g, correction)
    (trained,) = found
    assert trained != frozen
    assert found.keys() == by_loop.keys() == by_oracle.keys()
    assert relative_error(found[trained], by_loop[trained]) <= EXACT
    assert relative_error(found[trained], by_oracle[trained]) <= EXACT


@pytest.mark.parametrize("name", SOME)
@each_correction
def test_the_comparison_can_fail_since_the_plain_gradient_differs(name, correction):
    layer, x = LAYERS[name].layer(), LAYERS[name].input()
    output = layer(x)
    g = torch.randn_like(output)
    plain, wanted = gradients(output, layer, g)["weight"], oracle_gradients(layer, x, g, correction)["weight"]
    assert relative_error(plain, wanted) > VISIBLE


@dataclass(frozen=True)
class OffByTheBias(Correction):
    """A deliberate mistake: it forgets the + 1 of the bias."""

    def scales(self, factors):
        return dict.fromkeys(factors, 1 / factors["weight"])


@dataclass(frozen=True)
class OffByAFactor(Correction):
    """A deliberate mistake: twice the scale."""

    right: Correction

    def scales(self, factors):
        return {name: 2 * scale for name, scale in self.right.scales(factors).items()}


@pytest.mark.parametrize("name", ["linear-rows", "conv2d-groups"])
@each_correction
def test_the_comparison_detects_a_wrong_scale(name, correction):
    case = LAYERS[name]
    layer, x = case.layer(), case.input()
    for wrong in (OffByTheBias(), OffByAFactor(correction)):
        found, g = fast_and_grad_output(layer, x, wrong)
        assert relative_error(found["weight"], loop_gradients(layer, x, g, correction)["weight"]) > VISIBLE
        assert relative_error(found["weight"], oracle_gradients(layer, x, g, correction)["weight"]) > VISIBLE
