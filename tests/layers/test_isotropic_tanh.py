"""IsotropicTanh: the formula, short and very long rows."""

import math

import pytest
import torch

from adiv_optim.layers import IsotropicTanh

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12


@pytest.mark.parametrize("dim", [-1, 1, (1, 2, 3)], ids=str)
def test_output_is_the_formula(dim):
    x, layer = torch.randn(2, 3, 4, 5), IsotropicTanh(dim)
    dims = (dim,) if isinstance(dim, int) else dim
    behind = tuple(range(-len(dims), 0))
    rows = x.movedim(dims, behind)
    found = layer(x).movedim(dims, behind).flatten(-len(dims)).flatten(0, -2)
    for row, output in zip(rows.flatten(-len(dims)).flatten(0, -2), found, strict=True):
        length = math.sqrt(sum(value**2 for value in row.tolist()))
        torch.testing.assert_close(output, math.tanh(length) / length * row, rtol=EXACT, atol=EXACT)


def test_derivative_of_short_rows_is_close_to_the_identity_and_at_zero_it_is():
    for length in (0.0, 1e-300, 1e-30, 1e-13, 1e-12, 1e-11, 1e-6):
        x = torch.full((4,), length / 2)
        torch.testing.assert_close(torch.func.jacrev(IsotropicTanh())(x), torch.eye(4), rtol=0, atol=EXACT)


LONG = {
    "float64": (torch.float64, 1e150, 1e-15),
    "float32": (torch.float32, 1e18, 1e-6),
    "bfloat16": (torch.bfloat16, 1e18, 1e-2),
    "float16": (torch.float16, 3e4, 1e-3),  # |x|² is beyond float16
}


@pytest.mark.parametrize(("dtype", "size", "tolerance"), LONG.values(), ids=LONG)
def test_long_rows_have_length_one_and_pass_no_more_than_their_share(dtype, size, tolerance):
    x = torch.full((1, 4), size, dtype=dtype, requires_grad=True)
    output = IsotropicTanh()(x)
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
