"""What an accelerator does otherwise, here on a CPU: large stacks, whole blocks, roots by products; the same steps."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Preconditioned, Whitened, _device
from adiv_optim.optim import roots
from tests.helpers.cases import relative_error
from tests.helpers.remembered import remembered

pytestmark = pytest.mark.usefixtures("in_float64")

METHODS = {
    "whitened": partial(Whitened, every=3),
    "blocks": partial(Whitened, every=3, max_dim=5),
    "rank": partial(Whitened, every=3, rank=2),
    "preconditioned": partial(Preconditioned, every=3),
}


@pytest.fixture
def on_accelerator(monkeypatch):
    """Say that the CPU is one, and keep the roots by products."""
    found: list[Tensor] = []

    def by_products(matrix: Tensor, condition: float) -> Tensor | None:
        found.append(whole(matrix, condition))
        return found[-1]

    whole = roots.by_products
    monkeypatch.setattr(roots, "STRIP", 4)
    monkeypatch.setattr(roots, "by_products", by_products)
    monkeypatch.setattr(_device, "on_accelerator", lambda tensor: True)
    return found


def built(method: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    linear = [nn.Linear(9, 9) for _ in range(3)]
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 9), *linear)
    return model, METHODS[method](torch.optim.Adam(model.parameters(), weight_decay=0.1), model)


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> list[Tensor]:
    for step in range(first, last):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(6, 2, 5, 5)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("method", METHODS)
def test_steps_are_the_same_on_an_accelerator(method, on_accelerator, monkeypatch):
    found = train(*built(method), 0, 8)
    # A convolution's groups, a layer alone, and three of one shape.
    assert {len(matrix) for matrix in on_accelerator} == ({1, 2, 3} if method in ("whitened", "blocks") else set())
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


@pytest.mark.parametrize("method", METHODS)
def test_training_goes_on_elsewhere(method, on_accelerator, monkeypatch):
    model, optimizer = built(method)
    train(model, optimizer, 0, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    entries = remembered(optimizer)
    resumed = built(method)
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(copy.deepcopy(state))
    monkeypatch.setattr(_device, "on_accelerator", lambda tensor: False)
    elsewhere = built(method)
    for part, state in zip(elsewhere, saved, strict=True):
        part.load_state_dict(copy.deepcopy(state))
    for name, entry in remembered(elsewhere[1]).items():
        assert {key: torch.as_tensor(value).shape for key, value in entry.items()} == {
            key: torch.as_tensor(value).shape for key, value in entries[name].items()
        }
    found = train(*elsewhere, 4, 8)
    monkeypatch.setattr(_device, "on_accelerator", lambda tensor: True)
    wanted = train(model, optimizer, 4, 8)
    assert all(relative_error(*pair) <= 1e-8 for pair in zip(found, wanted, strict=True))
    assert all(map(torch.equal, train(*resumed, 4, 8), wanted))  # to the last bit where it was saved
