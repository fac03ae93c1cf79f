"""Least squares by conjugate gradients: what a solution must survive."""

import pytest
import torch

from adiv_optim._linalg.least_squares import Solution, least_squares

pytestmark = pytest.mark.usefixtures("in_float64")


def solve(matrix: torch.Tensor, right: torch.Tensor, **settings) -> Solution:
    return least_squares(lambda parts: matrix @ parts["w"], lambda u: {"w": matrix.T @ u}, right, **settings)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_travels(bad):
    """All entries of the matrix are positive, so that the gradient is inf and no NaN comes by itself."""
    found = solve(torch.ones(3, 2), torch.tensor([bad, 1.0, 1.0]))
    assert found.parts["w"].isnan().all()
    assert found.residual.isnan()
    assert solve(torch.ones(3, 2), torch.ones(3)).parts["w"].isfinite().all()


def test_iterations_after_convergence_spoil_nothing():
    """As those do that a slower problem asks for: rounding leaves a gradient that goes up and down, or grows."""
    matrices, right = torch.randn(8, 12, 6), torch.randn(8, 12)
    residuals = torch.stack(
        [
            least_squares(
                lambda parts: (matrices @ parts["w"][..., None])[..., 0],
                lambda u: {"w": (matrices.mT @ u[..., None])[..., 0]},
                right,
                batch_dims=1,
                tolerance=0.0,
                max_iterations=count,
            ).residual
            for count in (12, 14, 16, 18, 20, 50, 200)
        ]
    )
    assert residuals.max() <= 1e-9
    assert (residuals.diff(dim=0) <= 0).all()
