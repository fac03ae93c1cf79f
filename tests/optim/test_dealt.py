"""Covariances are factorised by one process each, for all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Preconditioned, Whitened
from adiv_optim._linalg.roots import NoRootError, Whole
from adiv_optim.optim import covariance as covariance_module
from adiv_optim.optim.processes import deal
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


def factors(optimizer: Any) -> list[Tensor]:
    every = (factor for layer in optimizer.watch.layers for factor in layer.factors)
    return [factor.matrix for factor in every if isinstance(factor, Whole)]


def spy(optimizer: Any, change: Callable[[str, Any], Any]) -> None:
    """Let what each covariance is factorised to pass by a function of its layer's name."""
    watch, factors_of = optimizer.watch, optimizer.watch.chart.factors

    def changed(covariances: list[Any]) -> list[Any]:
        names = {id(layer.covariance): layer.name for layer in watch.layers}
        return [change(names[id(each)], found) for each, found in zip(covariances, factors_of(covariances), strict=True)]

    watch.chart = watch.chart._replace(factors=changed)


def on_each(rank: int, count: int) -> dict[str, Any]:
    """By wrapper the layers that this process measured, and the weights."""
    found = {}
    for name in WRAPPERS:
        optimizer, measured = optimizer_of(name), []
        spy(optimizer, lambda name, found, to=measured: to.append(name) or found)
        step(optimizer, slice(rank, None, count))
        for p in optimizer.model.parameters():
            torch.distributed.all_reduce(p.grad)
        optimizer.step()
        found[name] = list(measured), optimizer.model.state_dict()
        received = factors(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())  # each process then factorises all
        # The same bits in the same layout: of another one products round otherwise.
        pairs = list(zip(received, factors(optimizer), strict=True))
        assert all(torch.equal(one, two) and one.stride() == two.stride() for one, two in pairs)
        assert len(pairs) >= 5 or name == "whitened-rank"  # which follows its eigenvectors on every process
    found["signs"] = of_other_signs(rank, count)
    optimizer = optimizer_of("whitened")
    spy(optimizer, lambda name, found: NoRootError("planted") if name == "0.weight" else found)
    step(optimizer, slice(rank, None, count))
    with pytest.warns(UserWarning, match=r"0.weight: (planted|no root of 10 columns found by the process)"):
        optimizer.step()
    metrics, coverage = optimizer.metrics(), optimizer.coverage()
    found["failed"] = metrics["Whitened/failed_factorisations"], [*coverage.never_seen]
    return found


def of_other_signs(rank: int | None, count: int = 1) -> dict[str, Tensor]:
    """The weights after some steps, where each process but the first finds eigenvectors of signs of its own."""
    optimizer, real = optimizer_of("whitened-rank"), covariance_module.subspace_iteration

    def turned(*arguments):
        values, vectors = real(*arguments)
        return values, vectors * torch.tensor([1.0, -1.0]) if rank else vectors

    covariance_module.subspace_iteration = turned
    try:
        for _ in range(3):
            step(optimizer, slice(rank, None, count))
            if rank is not None:
                for p in optimizer.model.parameters():
                    torch.distributed.all_reduce(p.grad)
            optimizer.step()
    finally:
        covariance_module.subspace_iteration = real
    return optimizer.model.state_dict()


@needs_distributed
def test_every_covariance_is_factorised_by_one_process(tmp_path):
    count = 2
    every = on_processes(count, on_each, tmp_path, count)
    names = [f"{place}.weight" for place in range(5)]
    for name in WRAPPERS:
        optimizer = optimizer_of(name)
        step(optimizer, slice(None))
        plain = optimizer.model.state_dict()["0.weight"] - 0.1 * optimizer.model[0].weight.grad
        optimizer.step()
        measured = [each for found in every for each in found[name][0]]
        assert sorted(measured) == (sorted(names * count) if name == "whitened-rank" else names)
        for found in every:
            for key, value in optimizer.model.state_dict().items():
                assert relative_error(found[name][1][key], value) <= EXACT
        assert relative_error(plain, optimizer.model[0].weight.detach()) > 1e-3
    wanted = of_other_signs(None)
    for found in every:
        assert max(relative_error(found["signs"][key], value) for key, value in wanted.items()) <= EXACT
        assert found["failed"] == (1, ["0.weight", "0.bias"])


def test_the_dearest_go_first_each_to_the_process_with_the_least_to_do():
    covariances = [layer.covariance for layer in optimizer_of("whitened").watch.layers]
    owner = deal(covariances, 2)
    assert [owner[each] for each in covariances] == [0, 1, 1, 1, 1]
    assert set(deal(covariances, 9).values()) == set(range(5))
