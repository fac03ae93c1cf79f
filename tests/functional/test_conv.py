"""functional.conv1d/2d/3d: patch norms, memory format, additivity, degenerate input, and errors."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import Disproportional, Proportional, functional
from tests.helpers.cases import CONV, CORRECTIONS, FUNCTIONAL_CONV, apply, each_correction, gradients, relative_error
from tests.helpers.references import loop_gradients

EXACT = 1e-12  # float64, relative
PATCH_NORM = 2e-14  # float64, relative to each patch


PATCHES = {
    "plain": {"kernel_size": (3, 3)},
    "kernel-1": {"kernel_size": (1, 1)},
    "uneven": {"kernel_size": (2, 3), "stride": (2, 1), "padding": (1, 2)},
    "dilated": {"kernel_size": (2, 3), "dilation": (3, 2), "padding": (2, 2)},
    "stride-beyond-kernel": {"kernel_size": (2, 2), "stride": (3, 3)},
    "groups": {"kernel_size": (3, 3), "padding": (1, 1), "groups": 2},
    "depthwise": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 1), "dilation": (1, 2), "groups": 4},
}


def patch_norms(x, kernel_size, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    box = functional.patch_squared_norm(x, kernel_size, stride, padding, dilation, groups)
    unfolded = F.unfold(x, kernel_size, dilation, padding, stride)
    # F.unfold lists channels slowest, so a group's rows are contiguous.
    return box, unfolded.unflatten(1, (groups, -1)).square().sum(2).view_as(box)


@pytest.mark.parametrize("options", PATCHES.values(), ids=PATCHES)
def test_patch_squared_norm_is_that_of_the_unfolded_patches(options):
    x = torch.randn(3, 4, 7, 8, dtype=torch.float64)
    box, unfolded = patch_norms(x, **options)
    torch.testing.assert_close(box, unfolded, rtol=PATCH_NORM, atol=0)


@pytest.mark.parametrize("options", PATCHES.values(), ids=PATCHES)
def test_patch_squared_norm_is_exact_patch_by_patch_over_sixteen_decades(options):
    # A running-sum or FFT box filter would lose the small patches beside the large, or go below zero.
    x = torch.randn(3, 4, 7, 8, dtype=torch.float64)
    x = x * torch.logspace(-16, 0, 8, dtype=torch.float64)
    box, unfolded = patch_norms(x, **options)
    assert (box >= 0).all()
    torch.testing.assert_close(box, unfolded, rtol=PATCH_NORM, atol=0)


def test_patch_squared_norm_of_zeros_beside_large_values_is_exactly_zero():
    x = torch.zeros(1, 1, 3, 12)
    x[..., :4] = 1e15
    box = functional.patch_squared_norm(x, (3, 3), (1, 1), (0, 0), (1, 1))
    assert torch.equal(box[..., 4:], torch.zeros_like(box[..., 4:]))
    assert (box >= 0).all()


@pytest.mark.parametrize("trained", [("weight", "bias"), ("weight",)], ids=["all-trained", "frozen-bias"])
@each_correction
def test_channels_last_stays_channels_last(trained, correction):
    layer = nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in trained)
    x = torch.randn(2, 4, 5, 7).contiguous(memory_format=torch.channels_last).requires_grad_()
    output = apply(layer, x, correction)
    output.backward(torch.randn(2, 6, 5, 7).contiguous(memory_format=torch.channels_last))
    for tensor in (output, x.grad, layer.weight.grad):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()


@each_correction
def test_gradient_is_additive_over_micro_batches(correction):
    layer, x = nn.Conv2d(3, 4, 3, padding=1).double(), torch.randn(8, 3, 4, 5, dtype=torch.float64)
    g = torch.randn(8, 4, 4, 5, dtype=torch.float64)
    whole = gradients(apply(layer, x, correction), layer, g)
    for x_part, g_part in zip(x.split(2), g.split(2), strict=True):
        apply(layer, x_part, correction).backward(g_part)
    for name, parameter in layer.named_parameters():
        assert relative_error(parameter.grad, whole[name]) <= EXACT


@each_correction
def test_layer_used_twice_gets_the_sum_of_both_uses(correction):
    layer = nn.Conv2d(3, 3, 3, padding=1).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    hidden = apply(layer, x, correction)
    hidden.retain_grad()
    output = apply(layer, hidden.tanh(), correction)
    g = torch.randn_like(output)
    output.backward(g)
    first = loop_gradients(layer, x, hidden.grad, correction)
    second = loop_gradients(layer, hidden.detach().tanh(), g, correction)
    for name, parameter in layer.named_parameters():
        assert relative_error(parameter.grad, first[name] + second[name]) <= EXACT


@each_correction
def test_kernel_1_is_a_linear_layer_over_pixels(correction):
    conv, linear = nn.Conv2d(5, 3, 1).double(), nn.Linear(5, 3).double()
    linear.load_state_dict({"weight": conv.weight.detach().view(3, 5), "bias": conv.bias.detach()})
    x, g = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.randn(2, 3, 3, 4, dtype=torch.float64)
    by_conv = gradients(apply(conv, x, correction), conv, g)
    by_linear = gradients(apply(linear, x.movedim(1, -1), correction), linear, g.movedim(1, -1))
    assert relative_error(by_conv["weight"].view(3, 5), by_linear["weight"]) <= EXACT
    assert relative_error(by_conv["bias"], by_linear["bias"]) <= EXACT


@each_correction
def test_groups_are_separate_layers(correction):
    whole = nn.Conv2d(4, 6, 3, groups=2).double()
    x, g = torch.randn(2, 4, 5, 5, dtype=torch.float64), torch.randn(2, 6, 3, 3, dtype=torch.float64)
    found = gradients(apply(whole, x, correction), whole, g)
    for group in range(2):
        part = nn.Conv2d(2, 3, 3).double()
        outputs, inputs = slice(3 * group, 3 * group + 3), slice(2 * group, 2 * group + 2)
        part.load_state_dict({"weight": whole.weight.detach()[outputs], "bias": whole.bias.detach()[outputs]})
        wanted = gradients(apply(part, x[:, inputs], correction), part, g[:, outputs])
        for name in wanted:
            assert relative_error(found[name][outputs], wanted[name]) <= EXACT


@pytest.mark.parametrize("dims", [1, 2, 3])
@each_correction
def test_empty_batch_gives_zero_gradients(dims, correction):
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims](3, 4, 2)
    x = torch.randn(0, 3, *(4,) * dims, requires_grad=True)
    apply(layer, x, correction).sum().backward()
    assert x.grad.shape == x.shape
    for parameter in layer.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@each_correction
def test_zero_patches_move_the_bias_only(bias, correction):
    layer = nn.Conv2d(3, 4, 2, bias=bias)
    output = apply(layer, torch.zeros(1, 3, 3, 3), correction)
    found = gradients(output, layer, torch.ones_like(output))
    assert torch.equal(found["weight"], torch.zeros_like(layer.weight))
    if bias:
        share = {Proportional: 4.0, Disproportional: 2.0}[type(correction)]
        assert torch.equal(found["bias"], torch.full((4,), share))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["input", "grad_output"])
@each_correction
def test_nan_and_inf_reach_the_gradient(bad, where, correction):
    layer, x, g = nn.Conv2d(3, 4, 2), torch.randn(2, 3, 3, 3), torch.randn(2, 4, 2, 2)
    (x if where == "input" else g)[0, 0, 0, 0] = bad
    assert not gradients(apply(layer, x, correction), layer, g)["weight"].isfinite().all()


@each_correction
def test_broadcast_and_strided_grad_output_are_handled(correction):
    layer, x = CONV["conv2d-every-option"].layer(), CONV["conv2d-every-option"].input()
    output = apply(layer, x, correction)
    shape = output.shape
    strided = torch.randn(*shape[:2], shape[3], shape[2], dtype=torch.float64).mT
    for g in (torch.ones((), dtype=torch.float64).expand(shape), strided):
        found = gradients(apply(layer, x, correction), layer, g)
        wanted = loop_gradients(layer, x, g, correction)
        for name in wanted:
            assert relative_error(found[name], wanted[name]) <= EXACT


@pytest.mark.parametrize("padding", [1, (1,), (1, 1), [1, 1], np.int64(1)], ids=repr)
def test_one_number_stands_for_every_axis(padding):
    x, weight = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3)
    found = functional.conv2d(x, weight, None, padding, padding, padding, correction=Proportional())
    assert torch.equal(found, F.conv2d(x, weight, None, padding, padding, padding))


X, W = torch.ones(2, 3, 5, 5), torch.ones(4, 3, 3, 3)
ERRORS = {
    "channels": (torch.ones(2, 4, 5, 5), W, {}, ValueError, r"\(2, 4, 5, 5\) has 4 channels.*groups=1 takes 3"),
    "channels-in-groups": (X, W, {"groups": 2}, ValueError, "has 3 channels.*groups=2 takes 6"),
    "too-few-dimensions": (torch.ones(3, 5), W, {}, ValueError, r"\(3, 5\) has 2 dimensions.*2 spatial"),
    "too-many-dimensions": (torch.ones(1, 2, 3, 5, 5), W, {}, ValueError, "has 5 dimensions"),
    "padding-name": (X, W, {"padding": "full"}, ValueError, "padding is 'full'; the names are 'valid' and 'same'"),
    "same-with-stride": (X, W, {"padding": "same", "stride": 2}, ValueError, "'same' needs stride 1, found"),
    "integer-input": (X.long(), W, {}, TypeError, "torch.int64.*real floating-point"),
    "complex-input": (X.to(torch.complex64), W, {}, TypeError, "torch.complex64.*real floating-point"),
}


@pytest.mark.parametrize(("input", "weight", "options", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_error_says_what_was_found_and_wanted(input, weight, options, error, message):
    with pytest.raises(error, match=rf"^conv2d: .*{message}"):
        functional.conv2d(input, weight, **options, correction=Proportional())


@pytest.mark.parametrize("trained", [True, False])
def test_a_kernel_beyond_one_axis_is_refused_in_torchs_words(trained):
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        functional.conv2d(torch.ones(1, 3, 2, 9), W.clone().requires_grad_(trained), correction=Proportional())


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_too_many_numbers_are_refused_in_torchs_words(name):
    with pytest.raises(RuntimeError, match=f"expected {name} to be a single integer value or a list of 2 values"):
        functional.conv2d(X, W, **{name: (1, 1, 1)}, correction=Proportional())


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_error_names_the_function(dims):
    with pytest.raises(ValueError, match=rf"^conv{dims}d: .*has 2 channels"):
        FUNCTIONAL_CONV[dims](
            torch.ones(1, 2, *(3,) * dims), torch.ones(1, 1, *(1,) * dims), correction=CORRECTIONS["proportional"]
        )


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_weight_of_other_dimensions_than_the_function_is_an_error(dims):
    other = dims % 3 + 1
    with pytest.raises(ValueError, match=f"conv{dims}d: .*weight"):
        FUNCTIONAL_CONV[dims](
            torch.ones(1, 2, *(3,) * dims), torch.ones(1, 2, *(1,) * other), correction=Proportional()
        )


@pytest.mark.parametrize("correction", [Proportional, "proportional", 1.0], ids=["class", "string", "number"])
def test_a_correction_that_is_none_is_an_error(correction):
    with pytest.raises(TypeError, match=r"must be an instance of adiv_optim\.Correction"):
        functional.conv2d(X, W, correction=correction)
