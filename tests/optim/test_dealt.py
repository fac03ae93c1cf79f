"""Covariances are factorised by one process each, for all."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Preconditioned, Whitened
from tests.helpers.cases import relative_error
from tests.helpers.processes import needs_distributed, on_processes

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12
SIZES = (9, 5, 5, 3)
WRAPPERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "whitened": (Whitened, {}),
    "whitened-blocks": (Whitened, {"max_dim": 4}),
    "whitened-rank": (Whitened, {"rank": 2}),
    "preconditioned": (Preconditioned, {}),
}

#: The sizes of what two processes factorise: the dearest go first, each to the one with the least to do.
DEALT = {
    "whitened": [[10], [6, 6, 4, 5]],
    "whitened-blocks": [[3, 3, 4, 3, 3], [3, 3, 4, 2, 3]],
    "whitened-rank": [[2] * 15] * 2,  # each process follows all eigenvectors, by two factors and a root of each layer
    "preconditioned": [[10], [6, 6, 4, 5]],
}


def optimizer_of(name: str) -> Any:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(size, 2) for size in SIZES] + [nn.Conv1d(4, 4, 2, groups=2)])
    kind, options = WRAPPERS[name]
    return kind(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1, **options)


def step(optimizer: Any, part: slice) -> None:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for layer in optimizer.model:
        shape = (6, 4, 5) if isinstance(layer, nn.Conv1d) else (6, layer.in_features)
        losses.append(layer(torch.randn(shape, generator=generator)[part]).square().sum())
    optimizer.zero_grad()
    sum(losses).backward()


@contextmanager
def factorising(change: Callable[[Tensor, Any], Any]) -> Iterator[list[int]]:
    """Let `change` have the matrices that LAPACK factorises, and what it makes of them; yields their sizes."""
    sizes, real = list[int](), {name: getattr(torch.linalg, name) for name in ("eigh", "cholesky_ex")}

    def noted(factorise: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def call(matrix: Tensor) -> Any:
            sizes.append(matrix.shape[-1])
            return change(matrix, factorise(matrix))

        return call

    for name, factorise in real.items():
        setattr(torch.linalg, name, noted(factorise))
    try:
        yield sizes
    finally:
        for name, factorise in real.items():
            setattr(torch.linalg, name, factorise)


def reduced(optimizer: Any) -> None:
    """Step on gradients that are added up over processes."""
    for p in optimizer.model.parameters():
        torch.distributed.all_reduce(p.grad)
    optimizer.step()


def on_each(rank: int, count: int) -> dict[str, Any]:
    """By wrapper the sizes that this process factorised, and weights after a step and after one of a resumed run."""
    found = {}
    for name in WRAPPERS:
        optimizer = optimizer_of(name)
        with factorising(lambda matrix, factors: factors) as sizes:
            step(optimizer, slice(rank, None, count))
            reduced(optimizer)
        first = copy.deepcopy(optimizer.model.state_dict())
        twin = copy.deepcopy(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())  # each process then factorises all
        for each in (optimizer, twin):
            for p in each.model.parameters():
                p.grad = torch.ones_like(p)
            each.step()  # no rows: what was measured stays
        resumed = zip(optimizer.model.parameters(), twin.model.parameters(), strict=True)
        # The same bits: factors in another layout would make products that round otherwise.
        assert all(torch.equal(*pair) for pair in resumed), name
        found[name] = sizes, first
    found["signs"] = of_other_signs(rank, count)
    optimizer = optimizer_of("whitened")

    def fails(matrix: Tensor, factors: Any) -> Any:
        if matrix.shape[-1] == SIZES[0] + 1:
            raise torch.linalg.LinAlgError("planted")
        return factors

    step(optimizer, slice(rank, None, count))
    with (
        factorising(fails),
        pytest.warns(UserWarning, match=r"0.weight: (no eigenvalues|no root of 10 columns found by the process)"),
    ):
        optimizer.step()
    coverage = optimizer.coverage()
    found["failed"] = sorted(coverage.treated), coverage.never_seen
    return found


def of_other_signs(rank: int | None, count: int = 1) -> dict[str, Tensor]:
    """The weights after some steps, where each process but the first finds eigenvectors of signs of its own."""
    optimizer = optimizer_of("whitened-rank")

    def turned(matrix: Tensor, factors: Any) -> Any:
        is_root = factors[1].shape == matrix.shape  # of Cholesky's the second part is no matrix
        return (factors[0], factors[1] * torch.tensor([1.0, -1.0])) if rank and is_root else factors

    with factorising(turned):
        for _ in range(3):
            step(optimizer, slice(rank, None, count))
            optimizer.step() if rank is None else reduced(optimizer)
    return optimizer.model.state_dict()


@needs_distributed
def test_every_covariance_is_factorised_by_one_process(tmp_path):
    count = 2
    every = on_processes(count, on_each, tmp_path, count)
    for name in WRAPPERS:
        optimizer = optimizer_of(name)
        step(optimizer, slice(None))
        plain = optimizer.model.state_dict()["0.weight"] - 0.1 * optimizer.model[0].weight.grad
        optimizer.step()
        assert [found[name][0] for found in every] == DEALT[name]
        for found in every:
            for key, value in optimizer.model.state_dict().items():
                assert relative_error(found[name][1][key], value) <= EXACT
        assert relative_error(plain, optimizer.model[0].weight.detach()) > 1e-3
    wanted = of_other_signs(None)
    for found in every:
        assert max(relative_error(found["signs"][key], value) for key, value in wanted.items()) <= EXACT
        treated, never_seen = found["failed"]
        assert treated == sorted(f"{place}.{kind}" for place in range(1, 5) for kind in ("weight", "bias"))
        assert never_seen["0.weight"] == "nothing measured yet, 10 columns, 1 factorisations failed"
