"""L2Norm, rows of one length, over images the layerwise baseline of Bird 2025, appendix B.2; and IsotropicTanh."""

import pytest
import torch

from adiv_optim.layers import DyISRU, IsotropicTanh, L2Norm

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12
LAYERWISE = (1, 2, 3)


@pytest.mark.parametrize("dim", [-1, 0, 1, (2, 3), (-3, -2, -1), LAYERWISE], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_rows_get_length_one_or_its_tanh_and_keep_their_direction(dim, dtype):
    x = torch.randn(3, 2, 4, 5, dtype=dtype)
    lengths = x.abs().square().sum(dim, keepdim=True).sqrt()
    torch.testing.assert_close(L2Norm(dim)(x) * lengths, x, rtol=EXACT, atol=0)
    torch.testing.assert_close(IsotropicTanh(dim)(x), lengths.tanh() / lengths * x, rtol=EXACT, atol=0)
    assert list(L2Norm(dim).state_dict()) == []


def test_black_image_stays_black_and_passes_no_gradient():
    x = torch.randn(2, 3, 4, 4)
    x[0] = 0
    x.requires_grad_()
    output = L2Norm(LAYERWISE)(x)
    (output + output.pow(3)).sum().backward()
    assert output[0].abs().max() == 0
    assert x.grad[0].abs().max() == 0
    assert x.grad[1].abs().max() > 0
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("function", [L2Norm(), IsotropicTanh(), DyISRU(2, c=16.0)], ids=["l2", "tanh", "isru"])
def test_integers_are_taken_for_numbers_and_not_rounded_back(function):
    x = torch.tensor([[3, -4]])
    assert torch.equal(function(x), function(x.float()))
    assert function(x).abs().min() > 0.5


def test_derivative_of_short_rows_is_close_to_the_identity_and_at_zero_it_is():
    for length in (0.0, 1e-300, 1e-30, 1e-13, 1e-12, 1e-11, 1e-6):
        x = torch.full((4,), length / 2)
        torch.testing.assert_close(torch.func.jacrev(IsotropicTanh())(x), torch.eye(4), rtol=0, atol=EXACT)


@pytest.mark.parametrize("length", [1e-5, 1e-4, 1e-3])
def test_second_derivative_of_short_rows_in_float32_is_no_rounding(length):
    """Of the sum of the outputs, 2 |x| at most, it is left out where |x|² is below ε / 2; rounding made more of it."""
    hessian = torch.func.hessian(lambda x: IsotropicTanh()(x).sum())
    x = length / 9 * torch.tensor([8.0, -4.0, 1.0])
    assert (hessian(x.float()) - hessian(x)).abs().max() <= 2 * (torch.finfo(torch.float32).eps / 2) ** 0.5


LONG = {
    "float64": (torch.float64, 1e150, 1e-15),
    "float32": (torch.float32, 1e18, 1e-6),
    "bfloat16": (torch.bfloat16, 1e18, 1e-2),
    "float16": (torch.float16, 3e4, 1e-3),  # |x|² is beyond float16
}


@pytest.mark.parametrize(("dtype", "size", "tolerance"), LONG.values(), ids=LONG)
@pytest.mark.parametrize("function", [L2Norm(), IsotropicTanh()], ids=["l2", "tanh"])
def test_long_rows_have_length_one_and_pass_no_more_than_their_share(function, dtype, size, tolerance):
    x = torch.full((1, 4), size, dtype=dtype, requires_grad=True)
    output = function(x)
    assert output.dtype == dtype
    output[0, 0].backward()
    torch.testing.assert_close(output.double(), torch.full((1, 4), 0.5), rtol=tolerance, atol=0)
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() <= 1 / size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_once(dtype):
    x = torch.randn(64, 512).to(dtype)
    output = IsotropicTanh()(x)
    assert output.dtype == dtype
    assert torch.equal(output, IsotropicTanh()(x.float()).to(dtype))
