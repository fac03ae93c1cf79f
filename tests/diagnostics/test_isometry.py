"""Isometry and its gap: float64, held against formulas and eigenvalues."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from adiv_optim.diagnostics import isometry, isometry_gap

EXACT, THEOREM = 1e-12, 1e-10

pytestmark = pytest.mark.usefixtures("in_float64")


def gram(*shape):
    x = torch.randn(*shape)
    return x @ x.mT


def by_eigenvalues(matrix):
    values = torch.linalg.eigvalsh(matrix)
    return values.log().mean(-1).exp() / values.mean(-1)


@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_isometry_is_the_ratio_of_geometric_and_arithmetic_mean_of_the_eigenvalues(n):
    matrix = gram(3, 2, n, 50)
    torch.testing.assert_close(isometry(matrix), by_eigenvalues(matrix), rtol=EXACT, atol=0)
    torch.testing.assert_close(isometry_gap(matrix), -by_eigenvalues(matrix).log(), rtol=EXACT, atol=EXACT)


def test_one_for_multiples_of_the_identity_and_free_of_scale():
    eye = torch.eye(7)
    torch.testing.assert_close(isometry(3 * eye), torch.tensor(1.0), rtol=0, atol=EXACT)
    matrix = gram(6, 20)
    for scale in (1e-200, 1e-9, 1e9, 1e200):
        torch.testing.assert_close(isometry_gap(scale * matrix), isometry_gap(matrix), rtol=EXACT, atol=0)


def test_lengths_that_differ_by_many_orders_cost_no_accuracy():
    x = torch.randn(6, 20) * torch.logspace(-7, 7, 6).unsqueeze(-1)
    a = x.norm(dim=-1)
    unit = x / a.unsqueeze(-1)
    wanted = isometry_gap(unit @ unit.mT) + (a.square().mean() / a.log().mean().exp().square()).log()
    torch.testing.assert_close(isometry_gap(x @ x.mT), wanted, rtol=THEOREM, atol=0)


SINGULAR = {
    "sum": lambda: torch.cat([x := torch.randn(4, 30), x[:1] + x[1:2]]),
    "zero-row": lambda: torch.cat([torch.randn(4, 30), torch.zeros(1, 30)]),
    "all-zero": lambda: torch.zeros(5, 30),
    "more-samples-than-features": lambda: torch.randn(5, 4),
    "many-features": lambda: torch.randn(4, 3072)[[0, 1, 2, 3, 2]],
}


@pytest.mark.parametrize("build", SINGULAR.values(), ids=SINGULAR)
def test_singular_matrices_have_isometry_zero_and_pass_no_gradient(build):
    for dtype in (torch.float32, torch.float64):
        x = torch.stack([build().to(dtype), torch.randn(5, build().shape[1], dtype=dtype)]).requires_grad_()
        regular = x.shape[-1] >= 5
        found, gap = isometry(x @ x.mT), isometry_gap(x @ x.mT)
        assert found[0] == 0
        assert gap[0] == torch.inf
        assert (found[1] > 0) == regular
        gap[1].backward(retain_graph=True)
        (found.sum() + gap.sum()).backward()
        assert x.grad.isfinite().all()
        assert torch.equal(x.grad[0], torch.zeros_like(x[0]))
        assert (x.grad[1].abs().max() > 0) == regular


def test_nearly_singular_matrices_keep_their_gap():
    for tilt in (1e-1, 1e-3, 1e-5, 1e-6):
        x = torch.tensor([[1.0, 0.0], [math.cos(tilt), math.sin(tilt)]])
        # 1 − cos² cancels to a relative ε / tilt².
        torch.testing.assert_close(isometry(x @ x.mT).item(), math.sin(tilt), rtol=1e-15 / tilt**2, atol=0)


def test_nan_and_inf_are_not_hidden_and_negative_matrices_have_isometry_zero():
    matrix = gram(3, 4, 10)
    matrix[0, 2, 1] = matrix[0, 1, 2] = torch.nan
    matrix[1] *= torch.inf
    found = isometry_gap(matrix)
    assert found[:2].isnan().all()
    assert isometry(matrix)[:2].isnan().all()
    assert found[2].isfinite()
    assert isometry(-torch.eye(3)) == 0


@pytest.mark.parametrize("function", [isometry, isometry_gap])
def test_gradcheck_passes(function):
    x = torch.randn(2, 3, 5, requires_grad=True)
    assert gradcheck(lambda x: function(x @ x.mT), (x,))
    assert gradgradcheck(lambda x: function(x @ x.mT), (x,))


def test_narrow_dtypes_are_computed_in_float32():
    matrix = (torch.eye(4) + 0.25).bfloat16()
    found = isometry_gap(matrix)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), isometry_gap(matrix.double()), rtol=1e-6, atol=1e-6)


def test_shapes_that_are_not_square_are_refused():
    for shape in ((3,), (3, 4), (2, 3, 4)):
        for function in (isometry, isometry_gap):
            with pytest.raises(ValueError, match=r"gram has shape .* must be \(\.\.\., n, n\)"):
                function(torch.randn(shape))
    with pytest.raises(ValueError, match=r"torch.complex128; it must be \(\.\.\., n, n\) and real"):
        isometry(torch.eye(3, dtype=torch.complex128))
