"""Square roots of covariances in float32: where LAPACK fails, and in any unit of the inputs."""

import pytest
import torch
from torch import Tensor

from adiv_optim.optim.low_rank import subspace_iteration
from adiv_optim.optim.roots import Whole, eigh, inverse_root
from tests.helpers.cases import relative_error


def lapack_fails_in_float32(monkeypatch, error: Exception | None) -> None:
    """By an error, or by vectors of NaN."""
    real = torch.linalg.eigh

    def failing(matrix: Tensor):
        if matrix.dtype == torch.float32 and error:
            raise error
        values, vectors = real(matrix)
        return (values, vectors) if matrix.dtype == torch.float64 else (values, torch.nan * vectors)

    monkeypatch.setattr(torch.linalg, "eigh", failing)


CUSOLVER = RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when …")


@pytest.mark.parametrize("error", [None, torch.linalg.LinAlgError("planted"), CUSOLVER])
def test_failure_in_float32_is_mended_in_float64(error, monkeypatch):
    x = torch.randn(40, 6)
    matrix = x.T @ x / 40
    basis = torch.eye(6)[:, :2]

    def factorised() -> list[Tensor]:
        values, _ = subspace_iteration(matrix @ basis, basis, matrix.trace() / 6)
        return [inverse_root(matrix, torch.tensor(0.1), condition=10.0), values]

    wanted = factorised()
    lapack_fails_in_float32(monkeypatch, error=error)
    found = factorised()
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert relative_error(one, other) <= 1e-5


def test_other_errors_than_a_factorisations_are_raised(monkeypatch):
    lapack_fails_in_float32(monkeypatch, error=RuntimeError("an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        eigh(torch.eye(3))


def test_matrix_without_eigenvalues_is_named_and_nothing_else_is_raised():
    for bad in (torch.nan, torch.inf):
        with pytest.raises(torch.linalg.LinAlgError, match=r"no eigenvalues found of a matrix of shape \(3, 3\)"):
            eigh(torch.full((3, 3), bad))


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_roots_do_not_depend_on_the_unit_of_the_inputs(scale):
    x = torch.randn(40, 6, dtype=torch.float64)
    matrix = x.T @ x / 40
    inverse = inverse_root(matrix, torch.tensor(0.1).double(), 100.0)
    ours = (matrix * scale**2).float()
    found = inverse_root(ours, torch.tensor(0.1 * scale**2), 100.0)
    assert relative_error(found.double() * scale, inverse) <= 1e-5
    assert relative_error(Whole(found).inverse.matrix.double() / scale, Whole(inverse).inverse.matrix) <= 1e-5
