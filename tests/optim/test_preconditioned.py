"""Preconditioned beside its formula, which the fuzzer has: what counts, in which precision, and for how long."""

import pytest
import torch
from torch import nn

from adiv_optim import Preconditioned
from tests.helpers.cases import relative_error
from tests.helpers.remembered import memory, remembered
from tests.helpers.steps import inputs, sgd, stepped

pytestmark = pytest.mark.usefixtures("in_float64")


def test_what_is_saved_does_not_move_with_the_average():
    layer = nn.Linear(4, 3)
    optimizer, kept = Preconditioned(sgd(layer), layer, every=1), []
    for seed in range(2):
        stepped(layer, optimizer, inputs(seed))
        kept += [memory(optimizer)[0], memory(optimizer)[0].clone()]
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])


def test_float16_is_summed_in_float32():
    layer = nn.Linear(6, 3).half()
    optimizer = Preconditioned(sgd(layer), layer)
    layer(100 * torch.randn(9, 6).half()).sum().backward()  # squares add up beyond the largest float16
    optimizer.step()
    assert remembered(optimizer)["weight"]["0"].dtype == torch.float32
    assert "weight" in optimizer.coverage().treated
    assert all(p.dtype == torch.float16 and bool(p.isfinite().all()) for p in layer.parameters())


def test_autocast_leaves_the_sums_as_they_are():
    layer, x = nn.Linear(6, 3, bias=False).float(), torch.randn(9, 6, dtype=torch.float32)
    optimizer = Preconditioned(sgd(layer), layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x).sum().backward()
        rounded = (x.mT @ x).double()
    optimizer.step()
    exact = x.mT.double() @ x.double()
    assert relative_error(memory(optimizer)[0][0].double(), exact) < 1e-5
    assert relative_error(rounded, exact) > 1e-4
