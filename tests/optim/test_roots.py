"""Square roots of covariances: against the definition, by both methods."""

import pytest
import torch

from adiv_optim.optim.roots import roots

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
