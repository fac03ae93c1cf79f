"""Sharded parameters: processes are one on the joined batch, whoever holds which rows, and go on where others stopped.

Those that FSDP1 has flattened are refused where rows are needed.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from adiv_optim import InputScaled, Preconditioned, UnitConsistent, Whitened, attach, detach, gauge
from adiv_optim.rows.layers import Corrected
from tests import wrappers
from tests.helpers import checkpoints, loops
from tests.helpers.loops import DIFFERENT, Method, Weights, adamw, deviation, plain_loop, sgd, split, weights
from tests.helpers.modules import Model
from tests.helpers.processes import needs_distributed, on_processes
from tests.wrappers import Wrapper, by_inputs

on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard needs a GPU in this torch"
)
pytestmark = [
    needs_distributed,
    on_cpu,
    pytest.mark.usefixtures("in_float64"),
    # torch's own, where no process group is there, and in 2.6.
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
fsdp = pytest.importorskip("torch.distributed.fsdp")

EXACT = 1e-12
CORRECTED = {name: wrapper for name, wrapper in wrappers.WRAPPERS.items() if wrapper.rule}
BY_INPUTS = {
    "whitened": by_inputs(Whitened, every=2),
    "whitened-rank": by_inputs(Whitened, every=2, rank=2, max_dim=20),
    "preconditioned": by_inputs(Preconditioned, every=2),
    "input-scaled": by_inputs(InputScaled, every=2, floor=0.1, hold=True),
}
BY_GAUGE: dict[str, gauge.NetworkGauge] = {
    "unit-consistent": gauge.NetworkGauge(every=2),
    "unit-consistent-layer": gauge.LayerGauge(),
    "unit-consistent-zeros": gauge.LayerGauge(every=2),
}


def muon(model: nn.Module) -> Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1)


INNER: dict[str, Callable[[nn.Module], Optimizer]] = {"adamw": adamw, "sgd": sgd, "muon": muon}
CASES = [(name, inner) for name in [*BY_INPUTS, "unit-consistent"] for inner in ("adamw", "sgd")]
CASES += [(name, "muon") for name in ("whitened", "input-scaled", "unit-consistent")]
CASES += [(name, inner) for name in [*CORRECTED, "unit-consistent-layer"] for inner in ("adamw", "sgd")]
CASES += [("unit-consistent-zeros", "sgd")]
#: On three processes, of which one has no rows, or a part of those of a group.
THREE = [("whitened", "adamw"), ("unit-consistent-layer", "sgd")]
#: On two processes: (copies, shards) of two dimensions.
HYBRID = [(2, 1), (1, 2)]
#: Wrappers that must know of all rows of a weight.
NEEDS_ROWS = ["whitened", "input-scaled"]
KINDS = ("input-scaled", "preconditioned", "unit-consistent", "whitened")
#: Biases that take the plain step; their scales are those of tanh and of the network's outputs, which are pinned.
PLAIN_BIASES = {"input-scaled": ("0.bias", "3.bias", "5.bias"), "unit-consistent": ("4.bias", "6.bias")}
#: Steps before a checkpoint, of which the last measures nothing: what is used then was measured before.
BEFORE = 4
RESUMED = [*CORRECTED, *BY_INPUTS, "unit-consistent"]
#: Which checkpoints are flattened.
CHECKPOINTS = [*((name, False) for name in RESUMED), ("proportional", True), ("whitened", True)]


def built(name: str, moved: float = 0.0) -> nn.Module:
    """Rows that two processes share unevenly, one of three having none; for gauges groups, on three cut within one.

    With `moved` it begins where only a checkpoint brings it back from.
    """
    torch.manual_seed(0)
    groups = [nn.Conv2d(4, 4, 1, groups=2)] if name in BY_GAUGE else []
    # Two outputs are left out: a process that holds their weights alone takes no step there.
    last = [nn.Linear(36, 7), nn.Tanh(), nn.Linear(7, 4), Model(lambda _, x: x[:, 2:])]
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *groups, nn.Flatten(), *last)
    with torch.no_grad():
        for p in model.parameters():
            p += moved
            if name == "unit-consistent-zeros":
                p[p.abs() < 0.03] = 0
    return model


def wrapped(name: str, inner: Optimizer, model: nn.Module) -> Any:
    """A wrapper; what is traced is traced before it is sharded."""
    if name not in BY_GAUGE:
        return {**CORRECTED, **BY_INPUTS}[name](inner, model, None)
    graph = gauge.trace(built(name), batches()[0][0])
    return UnitConsistent(inner, model, graph=graph, gauge=BY_GAUGE[name])


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (2 * torch.randn(12, 2, 5, 5, generator=generator), torch.randint(2, (12,), generator=generator))
        for _ in range(5)
    ]


def newton_schulz(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Muon's iteration in float64. In its own bfloat16 a sum in another order moves the bare Muon's weights by 1e-2."""
    a, b, c = coefficients
    tall = gradient.shape[0] > gradient.shape[1]
    found = (gradient.T if tall else gradient) / gradient.norm()
    for _ in range(steps):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.T if tall else found


def train(model: nn.Module, optimizer: Any, data: list[tuple[Tensor, Tensor]]) -> Weights:
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz):
        loops.train(model, optimizer, data)
    return {name: getattr(p, "full_tensor", p.clone)() for name, p in weights(model).items()}


@cache
def alone(name: str, inner: str, parts: int = 1) -> Weights:
    if name in CORRECTED:
        build = lambda: built(name)  # noqa: E731
        return plain_loop(Method(CORRECTED[name]), batches(), build=build, inner=INNER[inner], parts=parts)
    model = built(name)
    return train(model, wrapped(name, INNER[inner](model), model), batches())


def mesh(*shape: int) -> Any:
    names = ("copies", "shards")[-len(shape) :]
    return distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(model: nn.Module, by_layer: bool = False, on: Any = None) -> nn.Module:
    """Shard a model in one piece, or every layer by itself, whose class fully_shard then replaces too."""
    on = mesh(distributed.get_world_size()) if on is None else on
    for layer in model if by_layer else ():
        if list(layer.parameters()):
            fsdp.fully_shard(layer, mesh=on)
    return fsdp.fully_shard(model, mesh=on)


def ours(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [split(batch, distributed.get_world_size())[rank] for batch in batches()]


def trained(rank: int, name: str, inner: str, found: dict[str, Any] | None = None, **how: Any) -> Weights:
    model = sharded(built(name), **how)
    optimizer = wrapped(name, INNER[inner](model), model)
    result = train(model, optimizer, ours(rank))
    if found is not None:
        found[f"{name}-{inner}"], found[f"{name}-{inner}-covered"] = result, tuple(optimizer.coverage().treated)
    return result


def loaded(rank: int | None, name: str, folder: Path, flat: bool = False) -> Weights:
    """The rest of the loop from a checkpoint, in another model."""
    model = built(name, moved=1.0)
    model = model if rank is None else sharded(model)
    optimizer = wrapped(name, adamw(model), model)
    checkpoints.load(model, optimizer, folder / f"{name}-{flat}", flat)
    return train(model, optimizer, (batches() if rank is None else ours(rank))[BEFORE:])


def on_each_of_two(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, inner in CASES:
        trained(rank, name, inner, found, by_layer=inner == "sgd")
    for name in RESUMED:
        model = sharded(built(name))
        optimizer = wrapped(name, adamw(model), model)
        train(model, optimizer, ours(rank)[:BEFORE])
        for flattened in [flattened for each, flattened in CHECKPOINTS if each == name]:
            checkpoints.save(model, optimizer, folder / f"{name}-{flattened}", flattened)
            found[f"resumed-{name}-{flattened}"] = loaded(rank, name, folder, flattened)
    for shape in HYBRID:
        found |= {f"{shape}-{n}": trained(rank, n, "adamw", on=mesh(*shape)) for n in [*NEEDS_ROWS, "unit-consistent"]}
    found["poisoned"] = poisoned(rank)
    for name, wrap in CORRECTED.items():
        model = sharded(attach(built(name), wrap.rule), by_layer=True)
        found[f"attached-before-{name}"] = train(model, adamw(model), ours(rank))
        model = flat(built(name))
        train(model, wrapped(name, adamw(model), model), ours(rank))
        with fsdp.FullyShardedDataParallel.summon_full_params(model):
            found[f"fsdp1-{name}"] = weights(model.module)
    for first in (True, False):
        model, rule = built("proportional"), CORRECTED["proportional"].rule
        model = detach(sharded(attach(model, rule), True) if first else attach(sharded(model, True), rule))
        found[f"detached-{first}"] = (
            any(isinstance(m, Corrected) for m in model),
            train(model, adamw(model), ours(rank)),
        )
    for name in KINDS:
        found[f"fsdp1-{name}"] = refusal(name, flat(built(name)))
    found["traced-late"] = refusal("unit-consistent", sharded(built("")))
    return found


def on_each_of_three(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {f"{name}-{inner}": trained(rank, name, inner) for name, inner in THREE}
    return found | {f"resumed-{flat}": loaded(rank, "whitened", folder, flat) for flat in (False, True)}


def poisoned(rank: int) -> str:
    """What a step says where one process holds a weight that is not finite."""
    model = sharded(built("unit-consistent"))
    optimizer = wrapped("unit-consistent", sgd(model), model)
    if rank == 1:
        model[0].weight.to_local().data[0, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="holds inf") as told:
        optimizer.step()
    return str(told.value)


def flat(model: nn.Module) -> nn.Module:
    return fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def refusal(name: str, model: nn.Module) -> str:
    wrap: Wrapper = wrappers.WRAPPERS[name]
    with pytest.raises(ValueError, match="has sharded parameters") as told:
        wrap(adamw(model), model, batches()[0][0])
    return str(told.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory):
    return on_processes(2, on_each_of_two, tmp_path_factory.mktemp("two"), folder)


@pytest.fixture(scope="module")
def three(two, folder, tmp_path_factory):
    return on_processes(3, on_each_of_three, tmp_path_factory.mktemp("three"), folder)


@pytest.mark.parametrize(("name", "inner"), CASES)
def test_fsdp2(two, name, inner):
    wanted = alone(name, inner, 2)
    for rank in two:
        assert deviation(rank[f"{name}-{inner}"], wanted) <= (loops.EXACT if name in CORRECTED else EXACT)
        if name in (*CORRECTED, *KINDS) and inner != "muon":  # sharded one by one or whole, all is treated
            assert {*rank[f"{name}-{inner}-covered"], *PLAIN_BIASES.get(name, ())} == weights(built(name)).keys()
    bare = built(name)
    assert deviation(train(bare, INNER[inner](bare), batches()), wanted) > DIFFERENT


@pytest.mark.parametrize(("name", "inner"), THREE)
def test_three_processes_are_one_on_the_joined_batch(three, name, inner):
    for rank in three:
        assert deviation(rank[f"{name}-{inner}"], alone(name, inner)) <= EXACT


@pytest.mark.parametrize(("name", "flat"), CHECKPOINTS)
def test_fsdp2_resumes_from_a_sharded_checkpoint(two, name, flat):
    for rank in two:
        assert deviation(rank[f"resumed-{name}-{flat}"], rank[f"{name}-adamw"]) == 0


@pytest.mark.parametrize("name", BY_INPUTS)
def test_one_process_goes_on_where_two_have_stopped(two, folder, name):
    assert deviation(loaded(None, name, folder), alone(name, "adamw")) <= EXACT


def test_three_processes_go_on_where_two_have_stopped(three):
    for flat in (False, True):
        assert deviation(three[0][f"resumed-{flat}"], alone("whitened", "adamw")) <= EXACT


@pytest.mark.parametrize("name", [*NEEDS_ROWS, "unit-consistent"])
@pytest.mark.parametrize("shape", HYBRID, ids=str)
def test_copies_of_shards_are_one_on_the_joined_batch(two, shape, name):
    for rank in two:
        assert deviation(rank[f"{shape}-{name}"], alone(name, "adamw")) <= EXACT


@pytest.mark.parametrize("name", CORRECTED)
@pytest.mark.parametrize("kind", ["fsdp1", "attached-before"])
def test_fsdp1(two, kind, name):
    assert deviation(two[0][f"{kind}-{name}"], alone(name, "adamw", 2)) <= loops.EXACT


def test_fsdp2_detached_is_plain(two):
    bare = built("proportional")
    wanted = train(bare, adamw(bare), batches())
    for first in (True, False):
        corrected, found = two[0][f"detached-{first}"]
        assert not corrected
        assert deviation(found, wanted) <= EXACT


@pytest.mark.parametrize("name", KINDS)
def test_fsdp1_is_refused_where_rows_are_needed(two, name):
    kind = name.title().replace("-", "")
    message = rf"{kind}.* has sharded parameters \(flat\), which no process holds; use .*GradientOnly"
    for rank in two:
        assert re.match(message, rank[f"fsdp1-{name}"])


def test_errors_are_those_of_every_process(two):
    for rank in two:
        assert "has sharded parameters (DTensor), which no process holds; trace the model before" in rank["traced-late"]
        assert rank["poisoned"] == "'0.weight' holds inf; a weight without a magnitude has no scale."
