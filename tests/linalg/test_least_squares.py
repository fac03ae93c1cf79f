"""Least squares by conjugate gradients: what a solution must survive."""

import math

import pytest
import torch

from adiv_optim._linalg.least_squares import Solution, least_squares
from tests.helpers.seeds import manual_seed

pytestmark = pytest.mark.usefixtures("in_float64")


def solve(matrix: torch.Tensor, right: torch.Tensor, **settings) -> Solution:
    return least_squares(lambda parts: matrix @ parts["w"], lambda u: {"w": matrix.T @ u}, right, **settings)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_travels(bad):
    """All entries of the matrix are positive, so that the gradient is inf and no NaN comes by itself."""
    found = solve(torch.ones(3, 2), torch.tensor([bad, 1.0, 1.0]))
    assert found.parts["w"].isnan().all()
    assert math.isnan(found.residual)
    assert solve(torch.ones(3, 2), torch.ones(3)).parts["w"].isfinite().all()


def test_iterations_after_convergence_spoil_nothing():
    """Rounding leaves a gradient that goes up and down, or grows."""
    for seed in range(8):
        manual_seed(seed)
        matrix, right = torch.randn(12, 6), torch.randn(12)
        counts = (12, 14, 16, 18, 20, 50, 200)
        residuals = [solve(matrix, right, tolerance=0.0, max_iterations=count).residual for count in counts]
        assert max(residuals) <= 1e-9
        assert residuals == sorted(residuals, reverse=True)
