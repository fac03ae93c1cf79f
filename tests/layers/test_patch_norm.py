"""PatchNorm convolutions: outputs by torch's own. A step is that of a linear layer of patches: test_structural."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim.layers import PatchNormConv2d, PatchNormConvTranspose2d
from tests.helpers.cases import quiet_same
from tests.helpers.covering import paired
from tests.helpers.patch_norm import CASES, CLASSES, FORMS, PLAIN, build, reference

pytestmark = [pytest.mark.usefixtures("in_float64"), quiet_same]

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
