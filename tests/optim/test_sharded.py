"""Parameters sharded by fully_shard: two and three processes are one with the joined batch, uneven shards included."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from adiv_optim import InputScaled, Preconditioned, UnitConsistent, Whitened, gauge
from adiv_optim.gauge.scales import network as network_gauge
from adiv_optim.optim import input_method, input_scaled, whitened
from tests.helpers.loops import DIFFERENT, Weights, adamw, deviation, sgd, split, weights
from tests.helpers.processes import needs_distributed, on_processes

on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard needs a GPU in this torch"
)
pytestmark = [needs_distributed, on_cpu, pytest.mark.usefixtures("in_float64")]
fsdp = pytest.importorskip("torch.distributed.fsdp")

EXACT = 1e-12
Wrap = Callable[[Optimizer, nn.Module], Any]

WRAPPERS: dict[str, Wrap] = {
    "whitened": lambda inner, model: Whitened(inner, model, every=2),
    "whitened-rank": lambda inner, model: Whitened(inner, model, every=2, rank=2, max_dim=20),
    "preconditioned": lambda inner, model: Preconditioned(inner, model, every=2),
    "input-scaled": lambda inner, model: InputScaled(inner, model, every=2, floor=0.1, hold=True),
}
BY_GAUGE: dict[str, gauge.Gauge] = {
    "unit-consistent": gauge.NetworkGauge(every=2),
    "unit-consistent-layer": gauge.LayerGauge(),
    "unit-consistent-zeros": gauge.LayerGauge(every=2),
}
INNER: dict[str, Callable[[nn.Module], Optimizer]] = {"adamw": adamw, "sgd": sgd}


def muon(model: nn.Module) -> Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1)


INNER["muon"] = muon
NEWTON_SCHULZ = "torch.optim._muon._zeropower_via_newtonschulz"
CASES = [(name, inner) for name in [*WRAPPERS, "unit-consistent"] for inner in INNER]
CASES += [("unit-consistent-layer", "adamw"), ("unit-consistent-layer", "sgd"), ("unit-consistent-zeros", "sgd")]
#: On two processes: (copies, shards) of two dimensions.
HYBRID = [(2, 1), (1, 2)]
#: Wrappers that must know of all rows of a weight.
NEEDS_ROWS = ["whitened", "input-scaled"]
#: What of the sums over processes is left out → which wrappers then do something else.
LEFT_OUT = {"inputs": list(WRAPPERS), "rows": NEEDS_ROWS, "scales": ["unit-consistent", "unit-consistent-layer"]}
on_two = pytest.mark.parametrize("ranks", [2], indirect=True)


def network() -> nn.Module:
    """Rows that two processes share unevenly, and of which one of three has none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 7), nn.Tanh(), nn.Linear(7, 4))


def grouped() -> nn.Module:
    """As `network`, with groups whose rows are cut, on three processes, within a group."""
    first, *rest = network()
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2), *rest)


def built(name: str) -> nn.Module:
    """A network for a wrapper."""
    model = grouped() if name in BY_GAUGE else network()
    for p in model.parameters() if name == "unit-consistent-zeros" else ():
        p.data[p.abs() < 0.03] = 0
    return model


def wrapped(name: str, inner: Optimizer, model: nn.Module) -> Any:
    if name in WRAPPERS:
        return WRAPPERS[name](inner, model)
    graph = gauge.trace(built(name), batches()[0][0])
    return UnitConsistent(inner, model, graph=graph, gauge=BY_GAUGE[name])


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (2 * torch.randn(12, 2, 5, 5, generator=generator), torch.randint(2, (12,), generator=generator))
        for _ in range(5)
    ]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of which two outputs are no part: a process that holds their weights alone takes no step there."""
    return F.cross_entropy(outputs[:, 2:], targets)


def train(model: nn.Module, optimizer: Any, data: list[tuple[Tensor, Tensor]]) -> Weights:
    with mock.patch(NEWTON_SCHULZ, newton_schulz) if "muon" in INNER else nullcontext():
        for x, y in data:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return {name: getattr(p, "full_tensor", p.clone)() for name, p in weights(model).items()}


def sharded(mesh: Any, model: nn.Module, by_layer: bool = False) -> nn.Module:
    for layer in model if by_layer else ():
        if list(layer.parameters()):
            fsdp.fully_shard(layer, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def newton_schulz(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Muon's iteration in float64. In its own bfloat16 a sum in another order moves the bare Muon's weights by 1e-2."""
    a, b, c = coefficients
    tall = gradient.shape[0] > gradient.shape[1]
    found = (gradient.T if tall else gradient) / gradient.norm()
    for _ in range(steps):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.T if tall else found


@contextmanager
def without(what: str) -> Iterator[None]:
    places: dict[str, list[tuple[Any, str]]] = {
        "inputs": [(input_method, "add_up_rows")],
        "rows": [(whitened, "add_up_row_shards"), (input_scaled, "add_up_row_shards")],
        "scales": [(network_gauge, "add_up")],
    }
    with ExitStack() as stack:
        for place in places[what]:
            stack.enter_context(mock.patch.object(*place))
        yield


def every_loop(rank: int) -> dict[str, Any]:
    world = distributed.get_world_size()
    ours = [split(batch, world)[rank] for batch in batches()]
    flat = distributed.device_mesh.init_device_mesh("cpu", (world,))

    def trained(name: str, inner: str, mesh: Any = flat, by_layer: bool = False) -> Weights:
        model = sharded(mesh, built(name), by_layer)
        return train(model, wrapped(name, INNER[inner](model), model), ours)

    found: dict[str, Any] = {f"{name}-{inner}": trained(name, inner, by_layer=inner == "sgd") for name, inner in CASES}
    if world == 2:
        for what, names in LEFT_OUT.items():
            with without(what):
                found |= {f"{what}-{name}": trained(name, "sgd") for name in names}
        for shape in HYBRID:
            mesh = distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
            found |= {f"{shape}-{name}": trained(name, "adamw", mesh) for name in [*NEEDS_ROWS, "unit-consistent"]}
        found["poisoned"] = poisoned(rank, sharded(flat, built("unit-consistent")))
    return found


def poisoned(rank: int, model: nn.Module) -> str:
    """What a step says where one process holds a weight that is not finite."""
    optimizer = wrapped("unit-consistent", sgd(model), model)
    if rank == 1:
        model[0].weight.to_local().data[0, 0, 0, 0] = torch.inf
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "accepted"


@cache
def alone(name: str, inner: str) -> Weights:
    model = built(name)
    return train(model, wrapped(name, INNER[inner](model), model), batches())


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    return on_processes(request.param, every_loop, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("name", "inner"), CASES)
def test_sharded_processes_are_one_on_the_joined_batch(ranks, name, inner):
    wanted = alone(name, inner)
    for rank in ranks:
        assert deviation(rank[f"{name}-{inner}"], wanted) <= EXACT
    bare = built(name)
    assert deviation(train(bare, INNER[inner](bare), batches()), wanted) > DIFFERENT


@on_two
@pytest.mark.parametrize("name", [*NEEDS_ROWS, "unit-consistent"])
@pytest.mark.parametrize("shape", HYBRID, ids=str)
def test_copies_of_shards_are_one_on_the_joined_batch(ranks, shape, name):
    for rank in ranks:
        assert deviation(rank[f"{shape}-{name}"], alone(name, "adamw")) <= EXACT


@on_two
@pytest.mark.parametrize(("what", "name"), [(what, name) for what, names in LEFT_OUT.items() for name in names])
def test_every_sum_over_processes_is_needed(ranks, what, name):
    assert deviation(ranks[0][f"{what}-{name}"], alone(name, "sgd")) > DIFFERENT


@on_two
def test_a_weight_that_is_not_finite_on_one_process_is_named_on_all(ranks):
    for rank in ranks:
        assert rank["poisoned"] == "'0.weight' holds inf; a weight without a magnitude has no scale."
