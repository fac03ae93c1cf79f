"""DistributedDataParallel on two processes is one process on the joined batch."""

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.cases import relative_error
from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    METHODS,
    Weights,
    adamw,
    deviation,
    each_method_by_name,
    images,
    network,
    plain_loop,
    split,
    weights,
)
from tests.helpers.processes import needs_distributed, on_two_processes
from tests.helpers.remembered import remembered

pytestmark = [needs_distributed, pytest.mark.usefixtures("in_float64")]

#: What DistributedDataParallel is built with.
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "static-graph": {"static_graph": True}}


def trained(rank: int, name: str, micro_batches: int = 1, wrap_replica: bool = False, **options: Any) -> Weights:
    """This process's weights after the loop over its halves; all micro-batches but the last without a reduction."""
    model = network()
    replica = DistributedDataParallel(model, **options)
    wrapped = replica if wrap_replica else model
    optimizer = METHODS[name].wrap(adamw(wrapped), wrapped, images(1)[0][0])
    for batch in images():
        optimizer.zero_grad()
        micro = split(split(batch, 2)[rank], micro_batches)
        for number, (x, y) in enumerate(micro, start=1):
            with replica.no_sync() if number < len(micro) else nullcontext():
                (F.cross_entropy(replica(x), y) / len(micro)).backward()
        optimizer.step()
    return weights(model)


def every_loop(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in METHODS:
        for kind, options in OPTIONS.items():
            found[f"{kind}-{name}"] = trained(rank, name, **options)
        found[f"no-sync-{name}"] = trained(rank, name, micro_batches=2)
        found[f"replica-{name}"] = trained(rank, name, wrap_replica=True)
    return {**found, "experts": experts(rank)}


def experts(rank: int) -> list[Tensor]:
    """What is remembered of layers that one process each sends rows to: no sum may mix them up, nor wait for ever."""
    model = nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)])
    optimizer = METHODS["preconditioned"].wrap(adamw(model), model, None)
    model[rank](rows_of(rank)).sum().backward()
    for p in model.parameters():  # as a reduction of gradients would leave them
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [entries["0"][0] for entries in remembered(optimizer).values() if "0" in entries]


def rows_of(rank: int) -> Tensor:
    return torch.arange(5.0 * (3 + rank)).view(-1, 5).sin()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_two_processes(every_loop, tmp_path_factory.mktemp("ranks"))


@cache
def reference(name: str, parts: int) -> Weights:
    return plain_loop(METHODS[name], images(), parts=parts)


def check(ranks: list[dict[str, Any]], kind: str, name: str, parts: int = 2) -> None:
    one, two = (rank[f"{kind}-{name}"] for rank in ranks)
    assert all(torch.equal(one[path], two[path]) for path in one)
    assert deviation(one, reference(name, parts)) <= EXACT
    half = plain_loop(METHODS[name], [split(batch, 2)[0] for batch in images()])
    assert deviation(half, reference(name, parts)) > DIFFERENT


@each_method_by_name
@pytest.mark.parametrize("kind", OPTIONS)
def test_ddp(ranks, kind, name):
    check(ranks, kind, name)


@each_method_by_name
def test_ddp_no_sync(ranks, name):
    check(ranks, "no-sync", name, parts=4)


@each_method_by_name
def test_ddp_replica_is_what_is_wrapped(ranks, name):
    check(ranks, "replica", name)


def test_rows_that_processes_send_to_different_layers_stay_apart(ranks):
    for found in ranks:
        for rank, total in enumerate(found["experts"]):
            x = torch.cat([rows_of(rank), torch.ones(3 + rank, 1)], 1)
            assert relative_error(total, x.T @ x) <= EXACT
