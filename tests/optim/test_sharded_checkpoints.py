"""What two processes have saved by torch.distributed.checkpoint goes on with one and with three."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from tests.helpers import checkpoints
from tests.helpers.loops import adamw, deviation, split
from tests.helpers.processes import needs_distributed, on_processes
from tests.optim.test_sharded import DIFFERENT, EXACT, WRAPPERS, alone, batches, network, on_cpu, sharded, train

pytestmark = [
    needs_distributed,
    on_cpu,
    pytest.mark.usefixtures("in_float64"),
    # torch's own, where no process group is there, and in 2.6.
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
pytest.importorskip("torch.distributed.fsdp")

#: Steps before the checkpoint, of which the last measures nothing: what is used then was measured before.
BEFORE = 4


def built(name: str, moved: float = 0.0) -> tuple[nn.Module, Any]:
    """A network that only a checkpoint brings to where training began, unless it is not moved."""
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p += moved
    if distributed.is_initialized():
        sharded(distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),)), model)
    return model, WRAPPERS[name](adamw(model), model)


def ours(rank: int) -> list[Any]:
    return [split(batch, distributed.get_world_size())[rank] for batch in batches()]


def save(rank: int, folder: Path) -> None:
    for name in WRAPPERS:
        model, optimizer = built(name)
        train(model, optimizer, ours(rank)[:BEFORE])
        checkpoints.save(model, optimizer, folder / name)


def load(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in WRAPPERS:
        for averages in (True, False):
            model, optimizer = built(name, moved=1.0)
            checkpoints.load(model, optimizer, folder / name, averages)
            found[f"{name}-{averages}"] = train(model, optimizer, ours(rank)[BEFORE:])
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("saved")
    on_processes(2, save, tmp_path_factory.mktemp("two"), folder)
    return folder


@pytest.fixture(scope="module")
def three(saved, tmp_path_factory) -> dict[str, Any]:
    return on_processes(3, load, tmp_path_factory.mktemp("three"), saved)[0]


@pytest.mark.parametrize("name", WRAPPERS)
def test_three_processes_go_on_where_two_have_stopped(three, name):
    assert deviation(three[f"{name}-True"], alone(name, "adamw")) <= EXACT
    assert deviation(three[f"{name}-False"], alone(name, "adamw")) > DIFFERENT


@pytest.mark.parametrize("name", WRAPPERS)
def test_one_process_goes_on_where_two_have_stopped(saved, name):
    model, optimizer = built(name, moved=1.0)
    checkpoints.load(model, optimizer, saved / name)
    assert deviation(train(model, optimizer, batches()[BEFORE:]), alone(name, "adamw")) <= EXACT


def test_averages_of_other_layers_are_named(saved):
    _, optimizer = built("whitened")
    state = optimizer.averages.state_dict()
    del state["layers"]["3.weight"]["rows"]
    with pytest.raises(ValueError, match=r"\['layers'\]\['3.weight'\] lacks 'rows'"):
        optimizer.averages.load_state_dict(state)


def test_detached_there_are_no_averages():
    _, optimizer = built("whitened")
    optimizer.detach()
    with pytest.raises(RuntimeError, match="Whitened is detached, and remembers nothing"):
        _ = optimizer.averages
