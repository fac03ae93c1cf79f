"""Square roots of covariances: against the definition."""

import math

import pytest
import torch

from adiv_optim.optim import low_rank, roots
from adiv_optim.optim.low_rank import LowRank, low_rank_inverse_root, subspace_iteration
from adiv_optim.optim.roots import Whole, by_products, inverse_root
from tests.helpers.cases import relative_error

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize(("dtype", "limits"), [(torch.float64, (1e-11, 1e-9)), (torch.float32, (1e-4, 3e-2))])
@pytest.mark.parametrize("stack", [(), (2,)])
def test_roots(dtype, limits, stack):
    for exponent, limit in zip((3, 6), limits, strict=True):
        q, _ = torch.linalg.qr(torch.randn(*stack, 64, 64))
        values = torch.logspace(0, -exponent, 64)
        ridge = values[-1] / 2
        matrix = (q * (values - ridge)) @ q.mT
        matrix = ((matrix + matrix.mT) / 2).to(dtype)
        ridges = ridge.expand(stack).to(dtype)
        inverse = inverse_root(matrix, ridges, condition=2 * 10.0**exponent)
        root = Whole(inverse).inverse.matrix
        full, eye = matrix.double() + ridges.double()[..., None, None] * torch.eye(64), torch.eye(64)
        inverse, root = inverse.double(), root.double()
        assert (inverse @ inverse @ full - eye).abs().max() <= limit
        assert (inverse @ root - eye).abs().max() <= limit
        assert (root @ root - full).abs().max() <= limit
        assert (inverse @ full - eye).abs().max() > 0.5  # one root is not enough


@pytest.mark.parametrize("stack", [(1,), (2,)])
def test_root_by_products_is_that_by_eigenvalues(stack):
    for dtype, condition, limit in ((torch.float64, 1e6, 1e-8), (torch.float32, 1e4, 1e-3)):
        q, _ = torch.linalg.qr(torch.randn(*stack, 64, 64))
        values = torch.logspace(0, -math.log10(condition), 64)
        matrix, wanted = ((q * values**power) @ q.mT for power in (1, -0.5))
        # Of the Frobenius norm, and not the greatest eigenvalue.
        found = by_products(matrix.to(dtype), 8 * condition)
        assert relative_error(found.double(), wanted) <= limit
        assert torch.equal(found, found.mT)
    assert by_products(matrix, 10.0) is None  # of so few steps


def test_root_by_products_is_taken_in_float64_where_a_user_lets_products_round(monkeypatch):
    asked = []
    monkeypatch.setattr(roots._device, "to_float64", lambda tensor: asked.append(tensor) or tensor.double())
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    try:
        for products.fp32_precision in ("ieee", "tf32"):
            assert by_products(torch.eye(3)[None].float(), 3.0).dtype == torch.float32
    finally:
        products.fp32_precision = before
    assert len(asked) == 1


def covariance(*stack: int, size: int = 24) -> torch.Tensor:
    x = torch.randn(*stack, 50, size) * torch.logspace(0, -2, size)
    return x.mT @ x / 50


@pytest.mark.parametrize("stack", [(), (3,)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_low_rank_root_is_that_of_the_matrix_whose_other_eigenvalues_are_their_mean(stack, with_bias):
    matrix, ridge = covariance(*stack), torch.full(stack, 0.01)
    values, vectors = torch.linalg.eigh(matrix)
    flat = torch.cat([values[..., :-5].mean(-1, keepdim=True).expand(*stack, 19), values[..., -5:]], -1)
    wanted = [(vectors * (flat + ridge[..., None])[..., None, :] ** power) @ vectors.mT for power in (-0.5, 0.5)]
    parts = [torch.randn(*stack, 7, 24 - with_bias), *[torch.randn(*stack, 7, 1)] * with_bias]
    inverse = low_rank_inverse_root(values.sum(-1), values[..., -5:], vectors[..., -5:], ridge)
    for factor, matrix_wanted in zip((inverse, inverse.inverse), wanted, strict=True):
        assert isinstance(factor, LowRank)
        products = factor.right_multiply(parts), Whole(matrix_wanted).right_multiply(parts)
        for found, part in zip(*products, strict=True):
            assert (found - part).abs().max() <= 1e-12
    assert (wanted[0] - inverse_root(matrix, ridge)).abs().max() > 1e-2


@pytest.mark.parametrize("count", [0, 3, 5])
def test_matrix_of_no_more_eigenvalues_than_columns_is_found_at_once(count):
    x = torch.randn(count, 24)
    matrix, basis = x.mT @ x, torch.linalg.qr(torch.randn(24, 5)).Q
    values, vectors = subspace_iteration(matrix @ basis, basis, matrix.trace() / 24)
    assert ((vectors * values) @ vectors.mT - matrix).abs().max() <= 1e-11
    assert (vectors.mT @ vectors - torch.eye(5)).abs().max() <= 1e-12


def test_sketch_of_no_covariance_is_refused():
    basis = torch.linalg.qr(torch.randn(24, 5)).Q
    with pytest.raises(torch.linalg.LinAlgError, match="no eigenvalues found"):
        subspace_iteration(-covariance() @ basis, basis, torch.tensor(1.0))


def test_products_may_be_rounded_as_tf32_rounds_them(monkeypatch):
    """Of ten bits, with eigenvalues far below the greatest one's rounding."""

    def tf32(matrix: torch.Tensor) -> torch.Tensor:
        return ((matrix.float().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    values, failed = 0.25 ** torch.arange(64.0), 0
    level = values.mean().float()
    for _ in range(20):
        q, _ = torch.linalg.qr(torch.randn(64, 64))
        basis = torch.linalg.qr(torch.randn(64, 8)).Q.float()
        sketch = tf32((q * values) @ q.mT) @ tf32(basis)
        found = subspace_iteration(sketch, basis, level)
        assert (found[0][-1] - values[0]).abs() <= 0.1
        with monkeypatch.context() as patch:
            patch.setattr(low_rank, "_TF32", 0.0)
            try:
                subspace_iteration(sketch, basis, level)
            except torch.linalg.LinAlgError:
                failed += 1
    assert failed > 10
