"""Two processes are one on the joined batch, whatever rows each of them sees and whatever eigenvectors it finds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.cases import relative_error
from tests.helpers.processes import needs_distributed, on_processes
from tests.helpers.steps import BY_COVARIANCE

#: What the second process does with its half of a batch; or an interrupt of both, which then call step() again.
CASES = ("sees its rows", "is not called", "sees no rows", "finds other signs", "is interrupted")


def built(kind: Callable[..., Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, kind(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1)


def rows(seed: int) -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def with_other_signs(matrix: Tensor, eigh: Callable[..., Any] = torch.linalg.eigh) -> Any:
    values, vectors = eigh(matrix)
    return values, vectors * torch.tensor([1.0, -1.0]).repeat(len(values))[: len(values)]


def interrupted(matrix: Tensor) -> Any:
    raise KeyboardInterrupt


def on_each(rank: int) -> dict[tuple[str, str], dict[str, Tensor]]:
    """The weights after three steps on gradients that are added up, by wrapper and case."""
    found = {}
    for name, kind in BY_COVARIANCE.items():
        for case in CASES:
            model, optimizer = built(kind)
            real = torch.linalg.eigh
            torch.linalg.eigh = with_other_signs if rank and case == "finds other signs" else real
            for seed in range(3):
                optimizer.zero_grad()
                x, is_alone = rows(seed), case in ("is not called", "sees no rows")
                if rank == 0 or case != "is not called":
                    backward(model, x[rank::2] if not is_alone else x if rank == 0 else x[:0])
                for p in model.parameters():
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    torch.distributed.all_reduce(p.grad)
                if case == "is interrupted" and seed == 1 and name != "inverse":
                    torch.linalg.eigh = interrupted
                    with pytest.raises(KeyboardInterrupt):
                        optimizer.step()
                    torch.linalg.eigh = real
                optimizer.step()
            torch.linalg.eigh = real
            found[name, case] = model.state_dict()
    return found


@needs_distributed
def test_two_processes_are_one_on_the_joined_batch(tmp_path, in_float64):
    found = on_processes(2, on_each, tmp_path)
    for name, kind in BY_COVARIANCE.items():
        model, optimizer = built(kind)
        start = model.state_dict()["0.weight"].clone()
        for seed in range(3):
            optimizer.zero_grad()
            backward(model, rows(seed))
            optimizer.step()
        assert relative_error(start, model.state_dict()["0.weight"]) > 1e-3
        for weights in found:
            for case in CASES:
                for key, value in model.state_dict().items():
                    assert relative_error(weights[name, case][key], value) <= 1e-11, (name, case, key)
