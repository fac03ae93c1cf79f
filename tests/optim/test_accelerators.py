"""What an accelerator does otherwise, here on a CPU: large stacks, roots by products; the same steps."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import _device
from adiv_optim.optim import roots
from tests.helpers.cases import relative_error
from tests.helpers.steps import BY_COVARIANCE, stepped

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture
def on_accelerator(monkeypatch):
    """Say that the CPU is one, and keep the roots by products."""
    found: list[Tensor] = []

    def by_products(matrix: Tensor, condition: float) -> Tensor | None:
        found.append(whole(matrix, condition))
        return found[-1]

    whole = roots.by_products
    monkeypatch.setattr(roots, "by_products", by_products)
    monkeypatch.setattr(_device, "on_accelerator", lambda tensor: True)
    return found


def built(method: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    linear = [nn.Linear(9, 9) for _ in range(3)]
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 9), *linear)
    return model, BY_COVARIANCE[method](torch.optim.Adam(model.parameters(), weight_decay=0.1), model, every=3)


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> list[Tensor]:
    batches = torch.randn(8, 6, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    return stepped(model, optimizer, *batches[first:last])


@pytest.mark.parametrize("method", BY_COVARIANCE)
def test_steps_are_the_same_on_an_accelerator(method, on_accelerator, monkeypatch):
    found = train(*built(method), 0, 8)
    # A convolution's groups, a layer alone, and three of one shape.
    assert {len(matrix) for matrix in on_accelerator} == ({1, 2, 3} if method in ("whole", "blocks") else set())
    monkeypatch.undo()
    wanted = train(*built(method), 0, 8)
    assert all(relative_error(*pair) <= 1e-8 for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("damping", [0.1, 10.0, 1000.0])
def test_every_damping_takes_products(damping, on_accelerator):
    """The norm that they begin with is Frobenius's, which may be √d times the greatest eigenvalue."""
    rows = torch.randn(600, 128)
    matrix = rows.mT @ rows / len(rows)
    ridge = damping * matrix.diagonal().mean()
    inverse = roots.inverse_root(matrix[None], ridge[None], 128 / damping + 1)[0]
    assert on_accelerator.pop() is not None
    assert relative_error(inverse @ inverse @ (matrix + ridge * torch.eye(128)), torch.eye(128)) <= 1e-8


@pytest.mark.parametrize("method", BY_COVARIANCE)
def test_training_goes_on_elsewhere(method, on_accelerator, monkeypatch):
    model, optimizer = built(method)
    train(model, optimizer, 0, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def resumed() -> tuple[nn.Module, Any]:
        parts = built(method)
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        return parts

    again = resumed()
    monkeypatch.setattr(_device, "on_accelerator", lambda tensor: False)
    found = train(*resumed(), 4, 8)
    monkeypatch.setattr(_device, "on_accelerator", lambda tensor: True)
    wanted = train(model, optimizer, 4, 8)
    assert all(relative_error(*pair) <= 1e-8 for pair in zip(found, wanted, strict=True))
    assert all(map(torch.equal, train(*again, 4, 8), wanted))  # to the last bit where it was saved
