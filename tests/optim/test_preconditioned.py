"""Preconditioned beside its formula, which the fuzzer has: what counts, in which precision, and for how long."""

import copy

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Preconditioned
from tests.helpers.cases import relative_error
from tests.helpers.remembered import memory, remembered
from tests.helpers.steps import same

pytestmark = pytest.mark.usefixtures("in_float64")


class Noting(torch.optim.SGD):
    """Notes the weights and gradients that its last step found."""

    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        self.weights = [p.detach().clone() for p in held]
        self.gradients = [p.grad.clone() for p in held]
        return super().step(closure)


def wrapped(model: nn.Module, **options) -> Preconditioned:
    settings = {"damping": 0.1, "decay": 0.0, "every": 1, **options}
    return Preconditioned(Noting(model.parameters(), lr=0.1, momentum=0.9), model, **settings)


def with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1)], 1)


def given(optimizer: Preconditioned) -> Tensor:
    """[G, g_b] as the inner optimizer has it."""
    weight, bias = optimizer.inner.gradients
    return torch.cat([weight, bias[:, None]], 1)


def preconditioned(layer: nn.Linear, rows: Tensor) -> Tensor:
    """[G, g_b] (A + λI)⁻¹ by the rows that A is of, in float64."""
    covariance = rows.mT @ rows / len(rows)
    damped = covariance + 0.1 * covariance.diagonal().mean() * torch.eye(len(covariance))
    return torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1).double() @ torch.linalg.inv(damped)


def test_what_is_saved_does_not_move_with_the_average():
    optimizer = wrapped(nn.Linear(4, 3), decay=0.5)
    for keep in (True, False):
        optimizer.model(torch.randn(6, 4)).sum().backward()
        optimizer.step()
        if keep:
            memory = optimizer.state_dict()["state"][0]["adiv_optim.inputs.0"]
            saved = copy.deepcopy(memory)
    assert torch.equal(memory, saved)


def test_float16_is_summed_in_float32():
    layer = nn.Linear(6, 3).half()
    optimizer = wrapped(layer)
    layer(100 * torch.randn(9, 6).half()).sum().backward()  # squares add up beyond the largest float16
    optimizer.step()
    assert remembered(optimizer)["weight"]["0"].dtype == torch.float32
    assert all(gradient.dtype == torch.float16 for gradient in optimizer.inner.gradients)
    assert all(bool(gradient.isfinite().all()) for gradient in optimizer.inner.gradients)


def test_autocast_leaves_the_sums_as_they_are():
    layer, x = nn.Linear(6, 3).float(), torch.randn(9, 6, dtype=torch.float32)
    optimizer = wrapped(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x).sum().backward()
        rounded = (x.mT @ x).double()
    optimizer.step()
    rows = with_one(x.double())
    assert relative_error(given(optimizer), preconditioned(layer, rows)) < 1e-5
    assert relative_error(rounded, x.mT.double() @ x.double()) > 1e-4


def test_nan_travels_and_does_not_stay():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = wrapped(layer, decay=0.5)
    optimizer.inner.param_groups[0]["lr"] = 0.0
    for input in (x, torch.full((4, 3), torch.nan)):
        optimizer.zero_grad()
        layer(input).sum().backward()
        before, total = copy.deepcopy(layer.state_dict()), memory(optimizer)
        optimizer.step()
    assert optimizer.inner.gradients[0].isnan().all()
    assert layer.weight.grad.isnan().all()
    assert total
    assert same(memory(optimizer), total)
    layer.load_state_dict(before)
    optimizer.inner.state.clear()
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
    assert optimizer.inner.gradients[0].isfinite().all()
