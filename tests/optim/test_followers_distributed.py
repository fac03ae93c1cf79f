"""Layers that read one tensor keep one covariance on all processes, or on none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from adiv_optim import Whitened
from tests.helpers.cases import relative_error
from tests.helpers.inputs import mean_of
from tests.helpers.processes import needs_distributed, on_processes
from tests.helpers.projections import WRAPPERS, Projections, backward, built, copies, inputs, layer, one, sharing, step

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # a torch without distributed
    fully_shard = None

pytestmark = [needs_distributed, pytest.mark.usefixtures("in_float64")]

on_cpu = pytest.mark.skipif(
    fully_shard is None or not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard needs a GPU in this torch"
)
#: By rank, what k reads of the rows of this process; at the last the process sees none.
ACROSS: dict[str, list[Callable[..., Any]]] = {
    "all": [one, one, one],
    "one apart": [one, copies, one],
    "the first apart": [copies, one, one],
}


def on_each(rank: int, count: int) -> dict[str, Any]:
    found = {}
    for name, kind in WRAPPERS.items():
        for case, given in ACROSS.items():
            for empty in ("", "unseen", "no rows"):
                model, optimizer = built(given[rank], kind, every=1)
                for number in range(3):
                    optimizer.zero_grad()
                    x = inputs(number, 12)
                    last = empty and rank == count - 1
                    part = x[:0] if last else x[rank :: count - bool(empty)]
                    if not last or empty == "no rows":
                        backward(model, part)
                    for p in model.parameters():
                        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                        torch.distributed.all_reduce(p.grad)
                    optimizer.step()
                found[name, case, empty] = model.state_dict(), sharing(optimizer)
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_processes_follow_together_or_not_at_all(count, tmp_path):
    every = on_processes(count, on_each, tmp_path, count)
    for name, kind in WRAPPERS.items():
        model, reference = built(copies, kind, every=1)
        for number in range(3):
            step(model, reference, inputs(number, 12))
        for found in every:
            for case in ACROSS:
                for empty in ("", "unseen", "no rows"):
                    weights, shared = found[name, case, empty]
                    for key, value in model.state_dict().items():
                        assert relative_error(weights[key], value) <= 1e-12, (name, case, empty, key)
                    # A process that sees no rows has nothing to say against it.
                    apart = case == "the first apart" or (case == "one apart" and not (empty and count == 2))
                    assert shared == ("" if apart else "kv")


def uncalled(rank: int, count: int) -> Any:
    """The covariance of k, which the last process does not call."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(6, 4), "k": nn.Linear(6, 4)})
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = inputs(rank)
    (model["q"](x).sum() + (0 if rank == count - 1 else model["k"](x).sum())).backward()
    for p in model["k"].parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    (covariance,) = mean_of(layer(optimizer, "k"))
    return layer(optimizer, "k").rows, covariance[:6, :6]


def test_a_layer_that_one_process_does_not_call_follows_on_none(tmp_path):
    for rows, covariance in on_processes(2, uncalled, tmp_path, 2):
        assert rows == 6
        assert relative_error(covariance, inputs(0).T @ inputs(0) / 6) <= 1e-12


def on_shards(rank: int, count: int) -> Any:
    torch.manual_seed(0)
    model = fully_shard(Projections(one))
    optimizer = Whitened(torch.optim.AdamW(model.parameters(), lr=0.1), model, every=1)
    for number in range(3):
        optimizer.zero_grad()
        (model(inputs(number, 12)[rank::count]).square().sum() * count).backward()  # gradients are averaged
        optimizer.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}, sharing(optimizer)


@on_cpu
def test_sharded_layers_follow(tmp_path):
    model, reference = built(copies, every=1)
    for number in range(3):
        step(model, reference, inputs(number, 12))
    for weights, shared in on_processes(2, on_shards, tmp_path, 2):
        assert shared == "kv"
        assert max(relative_error(weights[name], value) for name, value in model.state_dict().items()) <= 1e-12
