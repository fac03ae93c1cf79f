"""What is cut into slices, to spare memory or time, is whole: the last slice, which is shorter, included."""

import pytest
import torch
import torch.nn.functional as F

from adiv_optim import BatchIdeal, functional
from adiv_optim.functional.linears import gram_of
from adiv_optim.functional.shared import parts, squared_norm
from tests.helpers.cases import relative_error

pytestmark = pytest.mark.usefixtures("in_float64")
EXACT = 1e-9


def test_products_over_many_rows_are_summed_to_the_last_row():
    left, right = torch.randn(150, 4), torch.randn(150, 3)
    assert relative_error(gram_of([left], [right]), left.T @ right) <= 1e-14
    assert relative_error(left[:128].T @ right[:128], left.T @ right) > 1e-3


def test_parts_hold_every_sample_once():
    x = torch.randn(7, 3, 60_000)
    slices = parts(x)
    assert len(slices) > 1
    assert len(x) % len(x[slices[0]])
    assert torch.cat([torch.arange(7)[part] for part in slices]).tolist() == list(range(7))
    torch.testing.assert_close(squared_norm(x, 1), x.square().sum(1), rtol=1e-14, atol=0)


def test_ideal_step_of_a_convolution_sums_the_patches_of_every_sample():
    x, weight, g = torch.randn(5, 8, 40, 40), torch.randn(2, 8, 5, 5), torch.randn(5, 2, 36, 36)  # three slices
    rule = BatchIdeal(0.1, per_sample=False)
    rows = F.unfold(x, 5).mT
    found, wanted = (
        torch.autograd.grad(output(leaf), leaf, gradient)[0]
        for output, leaf, gradient in (
            (lambda w: functional.conv2d(x, w, correction=rule), weight.clone().requires_grad_(), g),
            (lambda w: functional.linear(rows, w, None, rule), weight.flatten(1).requires_grad_(), g.flatten(2).mT),
        )
    )
    assert relative_error(found.flatten(1), wanted) <= EXACT
