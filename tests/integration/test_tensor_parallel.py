"""Layers that parallelize_module has cut, against one process with a layer for the columns of each of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from adiv_optim import InputScaled, Preconditioned, Proportional, UnitConsistent, Whitened, attach, gauge
from tests.helpers import checkpoints
from tests.helpers.loops import DIFFERENT, Weights, adamw, deviation, sgd
from tests.helpers.processes import needs_distributed, on_processes

pytestmark = [needs_distributed, pytest.mark.usefixtures("in_float64")]
parallel = pytest.importorskip("torch.distributed.tensor.parallel")

EXACT = 1e-12
#: Columns of `down` that each process holds; no other layer has more.
BLOCK = 6


class Network(nn.Module):
    """An embedding and a norm, a pair of layers that two or three processes share, and a head that each has whole.

    Args:
        ranks: processes.
        apart: whether the bias of the second layer is one that no layer has: it takes the plain step.
        split: whether the columns of each process are a layer of their own.
    """

    def __init__(self, ranks: int, apart: bool = False, split: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 4), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, BLOCK * ranks), nn.Linear(BLOCK * ranks, 5)
        self.head = nn.Linear(5, 3)
        self.apart = apart
        if apart:
            self.shift, self.down.bias = self.down.bias, None
        self.parts = nn.ModuleList()
        if split:
            for columns in self.down.weight.detach().split(BLOCK, 1):
                self.parts.append(nn.Linear(BLOCK, 5, bias=False))
                self.parts[-1].weight.data.copy_(columns)
            self.down.weight = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.relu(self.up(self.norm(self.embed(tokens))))
        pieces = zip(self.parts, x.split(BLOCK, -1), strict=True) if self.parts else ()
        x = sum(part(piece) for part, piece in pieces) if self.parts else self.down(x)
        return self.head(F.relu(x + self.shift if self.apart else x))


def network(ranks: int, **how: bool) -> nn.Module:
    torch.manual_seed(0)
    return Network(ranks, **how)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(11, (4, 6), generator=generator), torch.randint(3, (4, 6), generator=generator))
        for _ in range(5)
    ]


def unit_consistent(inner: Any, model: nn.Module) -> Any:
    ranks = model.up.weight.shape[0] // BLOCK
    graph = gauge.trace(network(ranks), batches()[0][0])
    return UnitConsistent(inner, model, graph=graph, gauge=gauge.LayerGauge(every=2))


COORDINATES: dict[str, Any] = {
    "input-scaled": lambda inner, model, **given: InputScaled(inner, model, every=2, floor=0.1, hold=True, **given),
    "preconditioned": lambda inner, model, **given: Preconditioned(inner, model, every=2, max_dim=BLOCK, **given),
    "unit-consistent": unit_consistent,
    "whitened": lambda inner, model, **given: Whitened(inner, model, every=2, max_dim=BLOCK, **given),
    "whitened-rank": lambda inner, model, **given: Whitened(inner, model, every=2, max_dim=BLOCK, rank=2, **given),
}
BY_INPUTS = [name for name in COORDINATES if name != "unit-consistent"]
INNER = {"adamw": adamw, "sgd": sgd}
CASES = [(name, inner) for name in COORDINATES for inner in INNER]
THREE = [("whitened", "adamw")]


def shared(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard

    plan = {
        "embed": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": parallel.SequenceParallel(),
        "up": parallel.ColwiseParallel(input_layouts=Shard(1)),
        "down": parallel.RowwiseParallel(),
    }
    return parallel.parallelize_module(model, mesh, plan)


def train(model: nn.Module, optimizer: Any, data: list[tuple[Tensor, Tensor]], copies: Any = None) -> Weights:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        for p in model.parameters() if copies else ():
            distributed.all_reduce(getattr(p.grad, "to_local", lambda p=p: p.grad)().div_(copies.size()), group=copies)
        optimizer.step()
    return {name: getattr(p, "full_tensor", p.clone)().detach() for name, p in model.named_parameters()}


def every_loop(rank: int, folder: Path) -> dict[str, Any]:
    world = distributed.get_world_size()
    flat = distributed.device_mesh.init_device_mesh("cpu", (world,))

    def trained(name: str, inner: str) -> Weights:
        model = shared(network(world), flat)
        return train(model, COORDINATES[name](INNER[inner](model), model), batches())

    found: dict[str, Any] = {
        f"{name}-{inner}": trained(name, inner) for name, inner in (CASES if world == 2 else THREE)
    }
    model = shared(network(world), flat)
    optimizer = COORDINATES["whitened"](sgd(model), model)
    train(model, optimizer, batches()[:1])
    found["covered"] = {**optimizer.coverage().treated, **optimizer.coverage().skipped}
    if world == 2:
        for name in COORDINATES:
            found[f"resumed-{name}"] = resumed(name, flat, folder / f"own-{name}")
            found[f"named-{name}"] = resumed(name, flat, folder / name, checkpoints.save, checkpoints.load)
        found["corrected"] = corrected(flat)
        found |= {f"copies-{name}": of_copies(rank, name) for name in BY_INPUTS}
    return found


def save_own(model: nn.Module, optimizer: Any, folder: Path) -> None:
    torch.save([model.state_dict(), optimizer.state_dict()], f"{folder}-{distributed.get_rank()}")


def load_own(model: nn.Module, optimizer: Any, folder: Path) -> None:
    states = torch.load(f"{folder}-{distributed.get_rank()}", weights_only=False)
    for each, state in zip((model, optimizer), states, strict=True):
        each.load_state_dict(state)


def resumed(name: str, mesh: Any, folder: Path, save: Any = save_own, load: Any = load_own) -> Weights:
    """From what each process has saved, or from one checkpoint of both, of which each has columns of its own."""
    model, again = (shared(network(2), mesh) for _ in range(2))
    optimizer, other = (COORDINATES[name](adamw(each), each) for each in (model, again))
    train(model, optimizer, batches()[:4])
    save(model, optimizer, folder)
    load(again, other, folder)
    return train(again, other, batches()[4:])


def of_copies(rank: int, name: str) -> Weights:
    """Two copies of layers that one process each holds: rows are added up over process_group."""
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    model = shared(network(2), mesh["model"])
    optimizer = COORDINATES[name](adamw(model), model, process_group=mesh["data"])
    data = [(x.chunk(2)[rank], y.chunk(2)[rank]) for x, y in batches()]
    return train(model, optimizer, data, mesh["data"].get_group())


def corrected(mesh: Any) -> Weights:
    model = attach(shared(network(2, apart=True), mesh), Proportional())
    return train(model, COORDINATES["whitened"](sgd(model), model, skip=["down"]), batches())


def alone(name: str, inner: str, ranks: int, split: bool = True) -> Weights:
    by_inputs = name in BY_INPUTS
    model = network(ranks, apart=by_inputs, split=by_inputs and split)
    found = train(model, COORDINATES[name](INNER[inner](model), model), batches())
    if model.parts:
        found["down.weight"] = torch.cat([found.pop(f"parts.{place}.weight") for place in range(ranks)], 1)
    return {"down.bias" if key == "shift" else key: value for key, value in found.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return on_processes(2, every_loop, folder, folder)


@pytest.mark.parametrize(("name", "inner"), CASES)
def test_tensor_parallel_processes_are_one_with_a_layer_for_the_columns_of_each(ranks, name, inner):
    wanted = alone(name, inner, len(ranks))
    for rank in ranks:
        assert deviation(rank[f"{name}-{inner}"], wanted) <= EXACT
    bare = network(len(ranks))
    assert deviation(train(bare, INNER[inner](bare), batches()), wanted) > DIFFERENT


def test_three_processes_are_too(tmp_path):
    for name, inner in THREE:
        for rank in on_processes(3, every_loop, tmp_path, tmp_path):
            assert deviation(rank[f"{name}-{inner}"], alone(name, inner, 3)) <= EXACT


@pytest.mark.parametrize("name", BY_INPUTS)
def test_copies_of_tensor_parallel_layers_are_one_on_the_joined_batch(ranks, name):
    """Of which each process has the columns whole, in the blocks of max_dim."""
    for rank in ranks:
        assert deviation(rank[f"copies-{name}"], alone(name, "adamw", 2, split=False)) <= EXACT


def test_corrected_layers_are_linear_layers(ranks):
    model = attach(network(2, apart=True), Proportional())
    wanted = train(model, COORDINATES["whitened"](sgd(model), model, skip=["down"]), batches())
    for rank in ranks:
        assert deviation(rank["corrected"], wanted) <= EXACT
    plain = network(2, apart=True)
    assert (
        deviation(wanted, train(plain, COORDINATES["whitened"](sgd(plain), plain, skip=["down"]), batches()))
        > DIFFERENT
    )


@pytest.mark.parametrize("name", COORDINATES)
@pytest.mark.parametrize("how", ["resumed", "named"])
def test_tensor_parallel_resumes_from_what_processes_have_saved_each_and_together(ranks, name, how):
    for rank in ranks:
        assert deviation(rank[f"{how}-{name}"], alone(name, "adamw", 2)) <= EXACT


def test_coverage_says_what_is_in_blocks_and_what_is_plain(ranks):
    for rank in ranks:
        found = rank["covered"]
        assert found["up.weight"] == "whitened, 5 columns"
        assert found["up.bias"] == "whitened, with its weight"
        assert found["down.weight"] == "whitened, 6 columns of this process"
        assert found["down.bias"] == "a bias, where columns of the weight are on other processes"
        assert found["norm.weight"] == "LayerNorm is not a layer whose rows are known"
        assert found["embed.weight"] == "Embedding is not a layer whose rows are known"
