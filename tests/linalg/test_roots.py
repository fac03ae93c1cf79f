"""Square roots of covariances: against the definition, by both methods."""

import pytest
import torch

from adiv_optim._linalg.roots import LowRank, Whole, leading, low_rank_roots, roots

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize("method", ["eigh", "newton-schulz"])
@pytest.mark.parametrize(("dtype", "limits"), [(torch.float64, (1e-11, 1e-9)), (torch.float32, (1e-4, 3e-2))])
@pytest.mark.parametrize("stack", [(), (2,)])
def test_roots(method, dtype, limits, stack):
    for exponent, limit in zip((3, 6), limits, strict=True):
        q, _ = torch.linalg.qr(torch.randn(*stack, 64, 64))
        values = torch.logspace(0, -exponent, 64)
        ridge = values[-1] / 2
        matrix = (q * (values - ridge)) @ q.mT
        matrix = ((matrix + matrix.mT) / 2).to(dtype)
        ridges = ridge.expand(stack).to(dtype)
        inverse, root = roots(matrix, ridges, method, condition=2 * 10.0**exponent)
        full, eye = matrix.double() + ridges.double()[..., None, None] * torch.eye(64), torch.eye(64)
        inverse, root = inverse.double(), root.double()
        assert (inverse @ inverse @ full - eye).abs().max() <= limit
        assert (inverse @ root - eye).abs().max() <= limit
        assert (root @ root - full).abs().max() <= limit
        assert (inverse @ full - eye).abs().max() > 0.5  # one root is not enough


def covariance(*stack: int, size: int = 24) -> torch.Tensor:
    x = torch.randn(*stack, 50, size) * torch.logspace(0, -2, size)
    return x.mT @ x / 50


@pytest.mark.parametrize("stack", [(), (3,)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_low_rank_roots_are_those_of_the_matrix_whose_other_eigenvalues_are_their_mean(stack, with_bias):
    matrix, ridge = covariance(*stack), torch.full(stack, 0.01)
    spectrum = leading(matrix, 5)
    values, vectors = torch.linalg.eigh(matrix)
    flat = torch.cat([values[..., :-5].mean(-1, keepdim=True).expand(*stack, 19), values[..., -5:]], -1)
    wanted = roots((vectors * flat[..., None, :]) @ vectors.mT, ridge)
    weight, bias = torch.randn(*stack, 7, 24 - with_bias), torch.randn(*stack, 7, 1) if with_bias else None
    for factor, matrix_wanted in zip(low_rank_roots(values.sum(-1), spectrum, ridge), wanted, strict=True):
        assert isinstance(factor, LowRank)
        for found, part in zip(
            factor.right_multiply(weight, bias), Whole(matrix_wanted).right_multiply(weight, bias), strict=True
        ):
            assert (found is None) == (part is None)
            assert part is None or (found - part).abs().max() <= 1e-12
    assert (wanted[0] - roots(matrix, ridge)[0]).abs().max() > 1e-2


def test_leading_eigenvectors_are_followed():
    values = torch.cat([torch.linspace(0.0, 0.3, 19), torch.linspace(1.0, 2.0, 5)])
    q, _ = torch.linalg.qr(torch.randn(24, 24))
    matrix = (q * values) @ q.mT
    spectrum = leading(covariance(), 5)  # of another matrix
    errors = []
    for _ in range(20):  # the error of an eigenvalue shrinks by 0.3² at least each time
        spectrum = leading(matrix, 5, spectrum.vectors)
        errors.append((spectrum.values - values[-5:]).abs().max())
    assert errors[0] > 1e-3
    assert errors[-1] <= 1e-12
    assert (matrix @ spectrum.vectors - spectrum.vectors * spectrum.values).abs().max() <= 1e-9
