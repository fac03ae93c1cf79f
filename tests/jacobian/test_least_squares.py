"""Least squares by conjugate gradients: the solution, and what it must survive."""

import math

import pytest
import torch

from adiv_optim.jacobian.ideal import least_squares
from tests.helpers.cases import relative_error
from tests.helpers.seeds import manual_seed

pytestmark = pytest.mark.usefixtures("in_float64")


def solve(matrix: torch.Tensor, right: torch.Tensor, **settings) -> tuple[torch.Tensor, float, float, int]:
    parts, *rest = least_squares(lambda parts: matrix @ parts["w"], lambda u: {"w": matrix.T @ u}, right, **settings)
    return parts["w"], *rest


@pytest.mark.parametrize(("rows", "columns"), [(4, 7), (7, 4)])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_solution_is_lapacks(rows, columns, ridge):
    matrix, right = torch.randn(rows, columns), torch.randn(rows)
    found, *_ = solve(matrix, right, ridge=ridge)
    stacked = torch.cat([matrix, math.sqrt(ridge) * torch.eye(columns)])
    target = torch.cat([right, torch.zeros(columns)])
    wanted = torch.linalg.lstsq(stacked, target.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
    assert relative_error(found, wanted) <= 1e-10
    assert relative_error(found * (1 + 1e-6), wanted) > 1e-10


def test_stopped_early_it_is_better_than_nothing():
    # The gradient of the objective may grow in the first steps, in which the objective itself always falls.
    for seed in range(100):
        manual_seed(seed)
        matrix, right = torch.randn(6, 8) * torch.randn(8).mul(3).exp(), torch.randn(6)
        found, *_ = solve(matrix, right, ridge=0.1, max_iterations=1)
        assert (right - matrix @ found).square().sum() + 0.1 * found.square().sum() < right.square().sum()


def test_nothing_to_reach_asks_for_no_step():
    found, *rest = solve(2 * torch.eye(2), torch.zeros(2))
    assert found.tolist() == [0.0, 0.0]
    assert rest == [0.0, 0.0, 0]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_travels(bad):
    """All entries of the matrix are positive, so that the gradient is inf and no NaN comes by itself."""
    found, residual, *_ = solve(torch.ones(3, 2), torch.tensor([bad, 1.0, 1.0]))
    assert found.isnan().all()
    assert math.isnan(residual)
    assert solve(torch.ones(3, 2), torch.ones(3))[0].isfinite().all()


def test_iterations_after_convergence_spoil_nothing():
    """Rounding leaves a gradient that goes up and down, or grows."""
    for seed in range(8):
        manual_seed(seed)
        matrix, right = torch.randn(12, 6), torch.randn(12)
        counts = (12, 14, 16, 18, 20, 50, 200)
        residuals = [solve(matrix, right, tolerance=0.0, max_iterations=count)[1] for count in counts]
        assert max(residuals) <= 1e-9
        assert residuals == sorted(residuals, reverse=True)
