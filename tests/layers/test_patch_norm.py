"""PatchNorm convolutions: outputs by torch's own, and exact effective updates."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim.layers import PatchNormConv1d, PatchNormConv2d, PatchNormConv3d, PatchNormConvTranspose2d
from tests.helpers.cases import quiet_same
from tests.helpers.covering import paired
from tests.helpers.patch_norm import CASES, CLASSES, FORMS, PLAIN, build, reference

pytestmark = [pytest.mark.usefixtures("in_float64"), quiet_same]

LEARNING_RATE = 0.1
EXACT = 1e-12  # float64, on numbers of order one

each_class = pytest.mark.parametrize("case", CLASSES.values(), ids=CLASSES)
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
#: The two formulas.
BOTH = {name: FORMS[name] for name in ("affine-like-alpha-beta", "norm-like-alpha-beta")}


@paired("case form", CASES, BOTH)
def test_output_is_the_formula_of_torchs_convolutions(case, form):
    layer, x = build(case, form)
    torch.testing.assert_close(layer(x), reference(layer, x), rtol=EXACT, atol=EXACT)


@each_class
def test_reference_would_notice_a_plain_convolution_or_the_other_form(case):
    layer, x = build(case, {})
    other, _ = build(case, {"form": "norm-like"})
    other.load_state_dict(layer.state_dict())
    x = 0.3 * x  # so that the 1 in |x|² + 1 counts
    for wrong in (PLAIN[type(layer)].forward(layer, x), other(x)):
        assert (wrong - reference(layer, x)).abs().max() > 1e-2


def test_reference_would_notice_one_norm_for_all_groups():
    layer, x = build(CASES["2d-groups"], {})
    every = (3**2) * F.avg_pool2d(x.square().sum(1, keepdim=True), 3, 1, 1)
    wrong = nn.Conv2d.forward(layer, x) / (every + 1).sqrt()
    assert (wrong - reference(layer, x)).abs().max() > 1e-2


#: Layers and inputs whose output is one patch of each group.
LONE = {
    "1d": (PatchNormConv1d, (4, 6, 3), {}, (1, 4, 3)),
    "2d": (PatchNormConv2d, (4, 6, (3, 2)), {}, (1, 4, 3, 2)),
    "2d-padded-dilated": (PatchNormConv2d, (4, 6, 3), {"dilation": 2, "padding": 1}, (1, 4, 3, 3)),
    "2d-groups": (PatchNormConv2d, (4, 6, 3), {"groups": 2}, (1, 4, 3, 3)),
    "3d": (PatchNormConv3d, (2, 3, 2), {}, (1, 2, 2, 2, 2)),
    "transposed": (PatchNormConvTranspose2d, (4, 6, 3), {"padding": 1}, (1, 4, 1, 1)),
}
#: Form and rate.
STEPS = {
    "affine-like": ({}, LEARNING_RATE),
    "affine-like-eq-37": ({"alpha": 0.7, "beta": -1.9}, LEARNING_RATE),
    "norm-like-eq-35": ({"form": "norm-like", "beta": 0.5}, LEARNING_RATE),
    "norm-like-at-half-the-rate": ({"form": "norm-like"}, LEARNING_RATE / 2),
}


def output_change(layer, x, g, learning_rate=LEARNING_RATE):
    optimizer = torch.optim.SGD(layer.parameters(), lr=learning_rate)
    before = layer(x)
    before.backward(g)
    optimizer.step()
    return (layer(x) - before).detach()


@paired("case form_rate length", LONE, STEPS, {"short": 1e-3, "unit": 1.0, "long": 1e3})
def test_step_on_a_lone_patch_moves_the_output_by_the_gradient(case, form_rate, length):
    form, learning_rate = form_rate
    layer, x = build(case, form)
    x = length * x / x.norm()
    g = torch.randn_like(layer(x))
    torch.testing.assert_close(output_change(layer, x, g, learning_rate), -LEARNING_RATE * g, rtol=0, atol=EXACT)


@paired("case bias", LONE, {"bias": True, "no-bias": False})
def test_norm_like_step_on_a_lone_patch_is_twice_the_gradient_or_once_without_a_bias(case, bias):
    kind, sizes, options, shape = case
    layer, x = build((kind, sizes, {**options, "bias": bias}, shape), {"form": "norm-like"})
    g = torch.randn_like(layer(x))
    wanted = -(2 if bias else 1) * LEARNING_RATE * g
    torch.testing.assert_close(output_change(layer, x, g), wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize("case", [LONE["2d-groups"], LONE["transposed"]], ids=["2d-groups", "transposed"])
def test_step_of_a_plain_convolution_is_not_the_gradient(case):
    kind, sizes, options, shape = case
    layer, x = PLAIN[kind](*sizes, **options), torch.randn(shape)
    g = torch.randn_like(layer(x))
    assert (output_change(layer, x, g) + LEARNING_RATE * g).abs().max() > 0.1


@paired("case form dtype", CLASSES, FORMS, {str(d): d for d in (torch.float64, torch.float32, torch.float16)})
def test_zero_patches_give_the_bias_and_finite_gradients(case, form, dtype):
    layer, x = build(case, form)
    layer, x = layer.to(dtype), torch.zeros_like(x, dtype=dtype).requires_grad_()
    output = layer(x)
    output.sum().backward()
    for tensor in (output, x.grad, layer.weight.grad, layer.bias.grad):
        assert tensor.isfinite().all()
    beta = 1.0 if layer.beta is None else layer.beta
    shift = beta / abs(beta) if layer.form == "affine-like" else beta
    channels = 1 if x.dim() == len(layer.kernel_size) + 2 else 0
    torch.testing.assert_close(
        output.movedim(channels, -1), (shift * layer.bias).expand_as(output.movedim(channels, -1))
    )


@each_form
def test_zero_patches_beside_others_leave_their_gradients_alone(form):
    layer = PatchNormConv2d(2, 3, 2, stride=2, **form)
    image = torch.randn(1, 2, 4, 4)
    image[..., :2, :2] = 0
    x = image.requires_grad_()
    layer(x).square().sum().backward()
    rest = image.detach()[..., 2:, 2:].clone().requires_grad_()
    layer(rest).square().sum().backward()
    torch.testing.assert_close(x.grad[..., 2:, 2:], rest.grad, rtol=EXACT, atol=EXACT)
    if layer.form == "norm-like":
        assert torch.equal(x.grad[..., :2, :2], torch.zeros(1, 2, 2, 2))


def test_small_patches_beside_large_ones_keep_their_norms():
    layer, x = PatchNormConv2d(1, 1, 3, form="norm-like", bias=False), 1e-4 * torch.rand(1, 1, 8, 8) + 1e-4
    x[..., 0, 0] = 1e4
    wanted = layer(x)
    layer, x = layer.float(), x.float()
    torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-5, atol=1e-6)
    # A running sum, as a convolution by FFT would, loses them beside 1e8.
    sums = F.pad(x.square(), (1, 0, 1, 0)).cumsum(2).cumsum(3)
    boxes = sums[..., 3:, 3:] - sums[..., :-3, 3:] - sums[..., 3:, :-3] + sums[..., :-3, :-3]
    assert (boxes < 0).any() or (boxes[0, 0, -1, -1] == 0)


def test_output_size_of_a_transposed_convolution():
    layer, x = PatchNormConvTranspose2d(4, 6, 3, stride=2, padding=1), torch.randn(2, 4, 5, 5)
    padded = PatchNormConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1)
    padded.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, output_size=(10, 10)), padded(x))
    with pytest.raises(ValueError, match="requested an output size of"):
        layer(x, output_size=(20, 20))


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_arguments_by_position_and_weights_are_those_of_torch(kind):
    transposed = issubclass(kind, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
    arguments = (4, 6, 3, 2, 1, 1, 2, False, 2) if transposed else (4, 6, 3, 2, 1, 2, 2, False, "reflect")
    ours, plain = kind(*arguments), PLAIN[kind](*arguments)
    assert ours.extra_repr() == f"{plain.extra_repr()}, form='affine-like', alpha=1.0, beta=1.0, eps=1e-12"
    plain.load_state_dict(ours.state_dict())
    assert torch.equal(plain.weight, ours.weight)
    ours.load_state_dict(PLAIN[kind](*arguments).state_dict())
    assert not torch.equal(ours.weight, plain.weight)


@paired("form kind", FORMS, {kind.__name__: kind for kind in (PatchNormConv2d, PatchNormConvTranspose2d)})
@pytest.mark.parametrize("size", [2e-6, 300.0, 10000.0], ids=str)
def test_float16_patches_whose_norms_float16_cannot_hold(kind, form, size):
    """|x|² exceeds 65504 above 256, and 1/|x| does below 1.5e-5; Wx itself is representable."""
    layer = kind(3, 4, 1, **form).half()
    x = (size * torch.tensor([1.0, 0.5, -1.0])).half().view(1, 3, 1, 1)
    output = layer(x)
    assert output.dtype == torch.float16
    # At 2e-6 the convolution's own output has few bits left, and W x is all that is lost.
    tolerance = 2e-1 if size < 1e-3 else 4e-3
    torch.testing.assert_close(output.double(), reference(layer.double(), x.double()), rtol=tolerance, atol=tolerance)
