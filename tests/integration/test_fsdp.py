"""Parameters sharded by fully_shard: every wrapper goes with them; those that FSDP1 has flattened are refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adiv_optim import attach, detach, gauge
from adiv_optim.attach.layers import Corrected
from tests.helpers import checkpoints
from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    METHODS,
    Batch,
    adamw,
    deviation,
    images,
    network,
    plain_loop,
    split,
    train,
    weights,
)
from tests.helpers.processes import needs_distributed, on_two_processes

on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard needs a GPU in this torch"
)
pytestmark = [needs_distributed, on_cpu, pytest.mark.usefixtures("in_float64")]
fsdp = pytest.importorskip("torch.distributed.fsdp")

CORRECTIONS = ["proportional", "disproportional", "batch-ideal"]
#: tests/optim/test_sharded.py has more of them.
COORDINATES = {
    "input-scaled": "InputScaled",
    "preconditioned": "Preconditioned",
    "unit-consistent": "UnitConsistent",
    "whitened": "Whitened",
}
#: The last one's scale is that of the network's outputs, which is pinned.
PLAIN_BIASES = {"input-scaled": ("0.bias", "3.bias", "5.bias"), "unit-consistent": ("5.bias",)}
each_correction = pytest.mark.parametrize("name", CORRECTIONS)


def shard(model: nn.Module, by_layer: bool) -> nn.Module:
    """Shard a model in one piece, or every layer by itself, whose class fully_shard then replaces too."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model if by_layer else ():
        if list(layer.parameters()):
            fsdp.fully_shard(layer, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() for name, p in weights(model).items()}


def halves(rank: int) -> list[Batch]:
    return [split(batch, 2)[rank] for batch in images()]


def wrapped(name: str, model: nn.Module) -> Any:
    """A wrapper; what is traced is traced before it is sharded."""
    traced = {"graph": gauge.trace(network(), images(1)[0][0])} if name == "unit-consistent" else {}
    return METHODS[name].wrap(adamw(model), model, None, **traced)


def flat(model: nn.Module) -> nn.Module:
    return fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def flat_whole(model: Any) -> dict[str, torch.Tensor]:
    with fsdp.FullyShardedDataParallel.summon_full_params(model):
        return weights(model.module)


def every_loop(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in CORRECTIONS + list(COORDINATES):
        for kind in ("model", "layers"):
            model = shard(network(), by_layer=kind == "layers")
            optimizer = wrapped(name, model)
            train(model, optimizer, halves(rank))
            found[f"{kind}-{name}"] = whole(model)
            found[f"{kind}-{name}-covered"] = tuple(optimizer.coverage().treated)
        found[f"resumed-{name}"] = resumed(rank, name, folder / name)
    for name in CORRECTIONS:
        method = METHODS[name]
        model = shard(attach(network(), method.rule), by_layer=True)
        train(model, adamw(model), halves(rank))
        found[f"attached-before-{name}"] = whole(model)
        model = flat(network())
        train(model, method.wrap(adamw(model), model, None), halves(rank))
        found[f"fsdp1-{name}"] = flat_whole(model)
    for order in ("attached-sharded", "sharded-attached"):
        model, rule = network(), METHODS["proportional"].rule
        model = shard(attach(model, rule), True) if order == "attached-sharded" else attach(shard(model, True), rule)
        detach(model)
        train(model, adamw(model), halves(rank))
        found[order] = (any(isinstance(module, Corrected) for module in model), whole(model))
    for name in COORDINATES:
        found[f"fsdp1-{name}"] = refusal(name, flat(network()))
    found["traced-late"] = refusal("unit-consistent", shard(network(), by_layer=False))
    return found


def resumed(rank: int, name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Half of the loop, a sharded checkpoint, and the rest from it in another model."""

    def start(seed: int) -> tuple[nn.Module, Any]:
        model = network()
        with torch.no_grad():
            for p in model.parameters():
                p += seed
        model = shard(model, by_layer=False)
        return model, wrapped(name, model)

    model, optimizer = start(seed=0)
    train(model, optimizer, halves(rank)[:2])
    checkpoints.save(model, optimizer, folder)
    model, optimizer = start(seed=1)
    checkpoints.load(model, optimizer, folder)
    train(model, optimizer, halves(rank)[2:])
    return whole(model)


def refusal(name: str, model: nn.Module) -> str:
    try:
        METHODS[name].wrap(adamw(model), model, images(1)[0][0])
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return on_two_processes(every_loop, folder, folder)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in ("model", "layers") for name in CORRECTIONS + list(COORDINATES)),
        *(("attached-before", name) for name in CORRECTIONS),
    ],
)
def test_fsdp2(ranks, kind, name):
    one, two = (rank[f"{kind}-{name}"] for rank in ranks)
    assert all(torch.equal(one[path], two[path]) for path in one)
    wanted = plain_loop(METHODS[name], images(), parts=2)
    assert deviation(one, wanted) <= EXACT
    bare = network()
    train(bare, adamw(bare), images())
    assert deviation(weights(bare), wanted) > DIFFERENT


@pytest.mark.parametrize("name", CORRECTIONS + list(COORDINATES))
def test_fsdp2_treats_layers_that_are_sharded_one_by_one(ranks, name):
    for kind in ("model", "layers"):
        assert {*ranks[0][f"{kind}-{name}-covered"], *PLAIN_BIASES.get(name, ())} == weights(network()).keys()


@each_correction
def test_fsdp1(ranks, name):
    assert deviation(ranks[0][f"fsdp1-{name}"], plain_loop(METHODS[name], images(), parts=2)) <= EXACT


@pytest.mark.parametrize("name", CORRECTIONS + list(COORDINATES))
def test_fsdp2_resumes_from_a_sharded_checkpoint(ranks, name):
    # Scales of UnitConsistent are found from the last ones, to rounding.
    nearly = EXACT if name == "unit-consistent" else 0.0
    for rank in ranks:
        assert deviation(rank[f"resumed-{name}"], rank[f"model-{name}"]) <= nearly


@pytest.mark.parametrize("order", ["attached-sharded", "sharded-attached"])
def test_fsdp2_detached_is_plain(ranks, order):
    corrected, found = ranks[0][order]
    assert not corrected
    bare = network()
    train(bare, adamw(bare), images())
    assert deviation(found, weights(bare)) <= EXACT


@pytest.mark.parametrize("name", COORDINATES)
def test_fsdp1_is_refused_where_rows_are_needed(ranks, name):
    for rank in ranks:
        assert re.match(
            rf"{COORDINATES[name]}.* has sharded parameters \(flat\), which no process holds; use .*GradientOnly",
            rank[f"fsdp1-{name}"],
        )


def test_fsdp2_is_to_be_traced_before_it_is_sharded(ranks):
    for rank in ranks:
        assert "has sharded parameters (DTensor), which no process holds; trace the model before" in rank["traced-late"]
