"""L2Norm over images: the layerwise baseline of Bird 2025, appendix B.2."""

import math

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from adiv_optim.layers import ChannelScale, IsotropicTanh, L2Norm, dyisru

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12
LAYERWISE = (1, 2, 3)


def test_layerwise_norm_makes_every_image_one_row_of_length_one():
    x = torch.randn(3, 2, 4, 5)
    for image, output in zip(x, L2Norm(LAYERWISE)(x), strict=True):
        length = math.sqrt(sum(value**2 for value in image.flatten().tolist()))
        torch.testing.assert_close(output, image / length, rtol=EXACT, atol=0)


def test_layerwise_norm_is_rms_norm_of_the_image_without_its_root():
    x = torch.randn(3, 2, 4, 5)
    rms_norm = nn.RMSNorm((2, 4, 5), eps=0.0, elementwise_affine=False)
    torch.testing.assert_close(math.sqrt(40) * L2Norm(LAYERWISE)(x), rms_norm(x), rtol=EXACT, atol=EXACT)
    # The norm over the channels of each pixel is another.
    assert (math.sqrt(40) * L2Norm(1)(x) - rms_norm(x)).abs().max() > 1e-2


def test_images_do_not_see_each_other():
    x = torch.randn(3, 2, 4, 5)
    others = x.clone()
    others[1:] *= 7
    assert torch.equal(L2Norm(LAYERWISE)(x)[0], L2Norm(LAYERWISE)(others)[0])


@pytest.mark.parametrize("dim", [1, LAYERWISE, (-3, -2, -1), (2, 3)], ids=str)
def test_gradcheck_passes(dim):
    assert gradcheck(L2Norm(dim), (torch.randn(2, 3, 2, 2, requires_grad=True),))


def test_unbatched_image_is_one_row_too():
    x = torch.randn(2, 4, 5)
    torch.testing.assert_close(L2Norm((-3, -2, -1))(x), x / x.norm(), rtol=EXACT, atol=0)


def test_channels_last_stays_so():
    x = torch.randn(3, 2, 4, 5).to(memory_format=torch.channels_last)
    model = nn.Sequential(L2Norm(LAYERWISE), ChannelScale(2, dim=1))
    output = model(x)
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output, model(x.contiguous()), rtol=EXACT, atol=0)


def test_layerwise_baseline_trains():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), L2Norm(LAYERWISE), nn.Tanh(), nn.Conv2d(4, 4, 3), L2Norm(LAYERWISE), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8) % 2
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(model(x), y))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_image_whose_squares_would_overflow(dtype):
    x = torch.full((1, 8, 16, 16), 1000.0, dtype=dtype)
    output = L2Norm(LAYERWISE)(x)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), torch.full(x.shape, 2048**-0.5), rtol=1e-2, atol=0)


def test_black_image_stays_black_and_passes_no_gradient():
    x = torch.randn(2, 3, 4, 4)
    x[0] = 0
    x.requires_grad_()
    output = L2Norm(LAYERWISE)(x)
    output.pow(3).sum().backward()
    assert output[0].abs().max() == 0
    assert x.grad[0].abs().max() == 0
    assert x.grad[1].abs().max() > 0
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("function", [L2Norm(), IsotropicTanh(), lambda x: dyisru(x, 16.0)], ids=["l2", "tanh", "isru"])
def test_integers_are_taken_for_numbers_and_not_rounded_back(function):
    x = torch.tensor([[3, -4]])
    assert torch.equal(function(x), function(x.float()))
    assert function(x).abs().min() > 0.5


def test_bad_arguments_are_errors():
    with pytest.raises(ValueError, match=r"L2Norm: eps is -1\.0; it must be finite and at least 0"):
        L2Norm(eps=-1.0)
    with pytest.raises(ValueError, match="eps is nan"):
        L2Norm(eps=math.nan)
    with pytest.raises(IndexError, match=r"Dimension out of range.*got 3"):
        L2Norm(LAYERWISE)(torch.zeros(2, 3, 4))
