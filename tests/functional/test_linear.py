"""functional.linear: additivity over rows, degenerate rows, and errors."""

import copy

import pytest
import torch
from torch import nn

from adiv_optim import Disproportional, Proportional, functional
from tests.helpers.cases import apply, each_correction, gradients, relative_error
from tests.helpers.references import loop_gradients

EXACT = 1e-12  # float64, relative


def layer_and_rows(rows=8):
    return nn.Linear(5, 3).double(), torch.randn(rows, 5, dtype=torch.float64)


@each_correction
def test_gradient_is_additive_over_micro_batches(correction):
    layer, x = layer_and_rows()
    g = torch.randn(8, 3, dtype=torch.float64)
    whole = gradients(apply(layer, x, correction), layer, g)
    for x_part, g_part in zip(x.split(2), g.split(2), strict=True):
        apply(layer, x_part, correction).backward(g_part)
    for name, parameter in layer.named_parameters():
        assert relative_error(parameter.grad, whole[name]) <= EXACT


@each_correction
def test_layer_used_twice_gets_the_sum_of_both_uses(correction):
    layer = nn.Linear(4, 4).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    hidden = apply(layer, x, correction)
    hidden.retain_grad()
    output = apply(layer, hidden.tanh(), correction)
    g = torch.randn_like(output)
    output.backward(g)
    first = loop_gradients(layer, x, hidden.grad, correction)
    second = loop_gradients(layer, hidden.detach().tanh(), g, correction)
    for name, parameter in layer.named_parameters():
        assert relative_error(parameter.grad, first[name] + second[name]) <= EXACT


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), (2, 2, 3, 5)], ids=["unbatched", "tokens", "four-dimensions"])
def test_leading_dimensions_are_rows(shape):
    layer, x, correction = nn.Linear(5, 3).double(), torch.randn(shape, dtype=torch.float64), Disproportional()
    output = apply(layer, x, correction)
    g = torch.randn_like(output)
    found = gradients(output, layer, g)
    flat = gradients(apply(layer, x.reshape(-1, x.shape[-1]), correction), layer, g.reshape(-1, g.shape[-1]))
    for name in flat:
        assert relative_error(found[name], flat[name]) <= EXACT


@each_correction
def test_scale_of_the_loss_goes_through_bit_for_bit(correction):
    layer, x = layer_and_rows()
    g = torch.randn(8, 3, dtype=torch.float64)
    plain = gradients(apply(layer, x, correction), layer, g)
    scaled = gradients(apply(layer, x, correction), layer, g * 2**10)
    for name in plain:
        assert torch.equal(scaled[name] / 2**10, plain[name])


EMPTY = {"no-rows": (0, 5), "no-tokens": (2, 0, 5), "no-batch": (0, 3, 5)}


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@each_correction
def test_empty_batch_gives_zero_gradients_of_the_right_shape(shape, bias, correction):
    layer = nn.Linear(5, 3, bias=bias).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    apply(layer, x, correction).sum().backward()
    assert x.grad.shape == shape
    for parameter in layer.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@each_correction
def test_zero_rows_move_the_bias_only(bias, correction):
    layer = nn.Linear(5, 3, bias=bias).double()
    output = apply(layer, torch.zeros(4, 5, dtype=torch.float64), correction)
    found = gradients(output, layer, torch.ones_like(output))
    assert torch.equal(found["weight"], torch.zeros(3, 5, dtype=torch.float64))
    if bias:
        share = {Proportional: 4.0, Disproportional: 2.0}[type(correction)]
        assert torch.equal(found["bias"], torch.full((3,), share, dtype=torch.float64))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@each_correction
def test_zero_rows_among_others_are_as_if_they_were_not_there_for_the_weight(bias, correction):
    layer = nn.Linear(5, 3, bias=bias).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    x[1] = 0
    g = torch.randn(4, 3, dtype=torch.float64)
    keep = [0, 2, 3]
    found = gradients(apply(layer, x, correction), layer, g)
    without = gradients(apply(layer, x[keep], correction), layer, g[keep])
    assert relative_error(found["weight"], without["weight"]) <= EXACT


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["input", "grad_output"])
@each_correction
def test_nan_and_inf_reach_the_gradient_as_in_torch(bad, where, correction):
    layer, x = layer_and_rows()
    g = torch.randn(8, 3, dtype=torch.float64)
    (x if where == "input" else g)[2, 1] = bad
    found = gradients(apply(layer, x, correction), layer, g)["weight"]
    assert not found.isfinite().all()
    untouched = found[:, [0, 2, 3, 4]] if where == "input" else found[[0, 2]]
    plain = gradients(layer(x), layer, g)["weight"]
    assert not plain.isfinite().all()
    if where == "grad_output":
        assert untouched.isfinite().all()


@each_correction
def test_broadcast_grad_output_is_handled(correction):
    # sum().backward() hands down an expanded tensor of stride 0.
    layer, x = layer_and_rows()
    found = gradients(apply(layer, x, correction).sum(), layer, torch.ones((), dtype=torch.float64))
    wanted = loop_gradients(layer, x, torch.ones(8, 3, dtype=torch.float64), correction)
    for name in wanted:
        assert relative_error(found[name], wanted[name]) <= EXACT


@each_correction
def test_transposed_input_and_weight_are_handled(correction):
    layer = nn.Linear(5, 3).double()
    layer.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64).mT)
    x = torch.randn(5, 8, dtype=torch.float64).mT
    g = torch.randn(3, 8, dtype=torch.float64).mT
    found = gradients(apply(layer, x, correction), layer, g)
    wanted = loop_gradients(layer, x, g, correction)
    for name in wanted:
        assert relative_error(found[name], wanted[name]) <= EXACT


def test_inputs_are_not_written_to():
    layer, x = layer_and_rows()
    copies = copy.deepcopy(layer), x.clone()
    g = torch.randn(8, 3, dtype=torch.float64)
    kept = g.clone()
    apply(layer, x, Proportional()).backward(g)
    assert torch.equal(x, copies[1])
    assert torch.equal(g, kept)
    assert torch.equal(layer.weight, copies[0].weight)


X, W = torch.ones(2, 5), torch.ones(3, 5)
ERRORS = {
    "feature-count": (torch.ones(2, 4), W, Proportional(), ValueError, r"\(2, 4\) has 4 features.*\(3, 5\) takes 5"),
    "no-dimensions": (torch.tensor(1.0), W, Proportional(), ValueError, "no features"),
    "integer-input": (X.long(), W, Proportional(), TypeError, "torch.int64.*real floating-point"),
    "sparse-input": (X.to_sparse(), W, Proportional(), TypeError, "torch.sparse_coo tensor; a correction needs dense"),
    "complex-input": (X.to(torch.complex64), W, Proportional(), TypeError, "torch.complex64.*real floating-point"),
    "correction-class": (X, W, Proportional, TypeError, r"the class Proportional: write Proportional\(\)"),
    "correction-string": (X, W, "proportional", TypeError, "found str; pass"),
}


@pytest.mark.parametrize(("input", "weight", "correction", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_error_says_what_was_found_and_wanted(input, weight, correction, error, message):
    with pytest.raises(error, match=message) as caught:
        functional.linear(input, weight, None, correction)
    if "correction" not in str(caught.value).split(" ")[:3]:
        assert str(caught.value).startswith("linear: ")


@pytest.mark.parametrize("shape", [(3,), (2, 3, 5)], ids=["vector", "stack"])
def test_weight_of_other_dimensions_is_an_error(shape):
    with pytest.raises(ValueError, match=r"linear: weight of shape .* it must have 2: \(out_features, in_features\)"):
        functional.linear(torch.ones(2, 4, shape[-1]), torch.ones(shape), None, Proportional())
