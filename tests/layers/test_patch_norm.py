"""PatchNorm convolutions: outputs by torch's own. A step is that of a linear layer of patches: test_structural."""

import io
import math

import pytest
import torch
from torch import nn

from adiv_optim.layers import (
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
    PatchNormConvTranspose1d,
    PatchNormConvTranspose2d,
    PatchNormConvTranspose3d,
)
from tests.helpers.cases import quiet_same
from tests.helpers.covering import paired

pytestmark = [pytest.mark.usefixtures("in_float64"), quiet_same]

EXACT = 1e-12  # float64, on numbers of order one

#: Class, constructor arguments, input shape.
CASES = {
    "1d-same-odd-total": (PatchNormConv1d, (4, 6, 4), {"padding": "same", "dilation": 3}, (2, 4, 12)),
    "2d-oblong": (
        PatchNormConv2d, (4, 6, (3, 2)),
        {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 3)}, (2, 4, 7, 8),
    ),
    "2d-reflect": (
        PatchNormConv2d, (4, 6, 3), {"padding": (2, 1), "padding_mode": "reflect", "groups": 2}, (2, 4, 5, 6)
    ),
    "2d-1x1-circular": (PatchNormConv2d, (4, 6, 1), {"padding": 1, "padding_mode": "circular"}, (2, 4, 5, 6)),
    "3d": (PatchNormConv3d, (2, 4, 2), {"groups": 2, "padding": 1, "stride": (1, 2, 1)}, (2, 2, 3, 4, 3)),
    "1d-1-strided-unbatched": (PatchNormConv1d, (4, 6, 1), {"stride": 3, "groups": 2}, (4, 9)),
    "transposed-1d-unbatched": (PatchNormConvTranspose1d, (4, 6, 3), {"stride": 2, "groups": 2}, (4, 5)),
    "transposed-2d-oblong": (
        PatchNormConvTranspose2d, (4, 6, (3, 2)),
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "dilation": (1, 2)}, (2, 4, 4, 3),
    ),
    "transposed-2d-cropped": (PatchNormConvTranspose2d, (4, 6, 2), {"padding": 2, "stride": 2}, (2, 4, 5, 5)),
    "transposed-2d-gaps": (PatchNormConvTranspose2d, (4, 6, 1), {"stride": 2, "bias": False}, (2, 4, 3, 3)),
    "transposed-3d": (PatchNormConvTranspose3d, (2, 4, 2), {"groups": 2, "stride": (1, 2, 1)}, (1, 2, 2, 2, 3)),
}  # fmt: skip

FORMS = {
    "affine-like": {},
    "affine-like-alpha-beta": {"alpha": -0.5, "beta": 2.0},
    "norm-like": {"form": "norm-like"},
    "norm-like-alpha-beta": {"form": "norm-like", "alpha": -3.0, "beta": 0.6},
}

#: The torch layer of every class.
PLAIN = {kind: getattr(nn, kind.__name__.removeprefix("PatchNorm")) for kind, *_ in CASES.values()}


@torch.no_grad()
def reference(layer, input):
    """The layer's output by torch's convolutions: of the input by its weights, and of the squares by ones."""
    kind, last = PLAIN[type(layer)], "output_padding" if layer.transposed else "padding_mode"
    options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups", last)}
    sizes = layer.in_channels, layer.out_channels, layer.kernel_size
    plain = kind(*sizes, bias=False, **options, dtype=layer.weight.dtype)
    sums = kind(layer.in_channels, layer.groups, layer.kernel_size, bias=False, **options)
    plain.weight.copy_(layer.weight)
    nn.init.ones_(sums.weight)
    channels = -len(layer.kernel_size) - 1
    norm = sums(input.abs().square()).repeat_interleave(layer.out_channels // layer.groups, channels)
    bias = torch.zeros(layer.out_channels) if layer.bias is None else layer.bias
    # Bird 2025, Eqs. 37, 56 and 35, of W x, b and |x|².
    linear, bias, alpha, beta = plain(input), bias.view(-1, *[1] * len(layer.kernel_size)), layer.alpha, layer.beta
    if layer.form == "affine-like":
        return (alpha * linear + beta * bias) / (alpha**2 * norm + beta**2) ** 0.5
    if beta is None:
        return math.copysign(1, alpha) * linear / norm.clamp(min=1e-24) ** 0.5 + bias
    return alpha * linear / (alpha**2 * norm.clamp(min=1e-24) / (1 - beta**2)) ** 0.5 + beta * bias


@paired("case form", CASES, FORMS)
def test_output_is_the_formula_of_torchs_convolutions(case, form):
    kind, sizes, options, shape = case
    for dtype in (torch.float64, torch.complex128):
        layer, x = kind(*sizes, **options, **form, dtype=dtype), torch.randn(shape, dtype=dtype)
        torch.testing.assert_close(layer(x), reference(layer, x), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
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


def test_a_traced_layer_is_saved_and_computes_the_same():
    layer, x, file = PatchNormConv2d(3, 4, 3), torch.randn(2, 3, 6, 6), io.BytesIO()
    torch.jit.save(torch.jit.trace(layer, x), file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(x), layer(x), rtol=EXACT, atol=EXACT)


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
