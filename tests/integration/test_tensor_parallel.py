"""Layers that parallelize_module has cut, against one process; methods that read inputs leave them alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from adiv_optim import InputScaled, Preconditioned, UnitConsistent, Whitened, gauge
from tests.helpers import checkpoints
from tests.helpers.loops import DIFFERENT, Weights, adamw, deviation, sgd
from tests.helpers.modules import Model
from tests.helpers.processes import needs_distributed, on_processes

pytestmark = [
    needs_distributed,
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:.* treats less than half"),
]
parallel = pytest.importorskip("torch.distributed.tensor.parallel")

EXACT = 1e-12


def compute(model: Any, tokens: Tensor) -> Tensor:
    return model.head(F.relu(model.down(F.relu(model.up(model.norm(model.embed(tokens)))))))


def network() -> nn.Module:
    """An embedding and a norm, a pair of layers that processes share, and a head that each has whole."""
    torch.manual_seed(0)
    linear = {name: nn.Linear(*ends) for name, ends in {"up": (4, 12), "down": (12, 5), "head": (5, 3)}.items()}
    return Model(compute, embed=nn.Embedding(11, 4), norm=nn.LayerNorm(4), **linear)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(11, (4, 6), generator=generator), torch.randint(3, (4, 6), generator=generator))
        for _ in range(5)
    ]


def unit_consistent(inner: Any, model: nn.Module, **given: Any) -> Any:
    graph = gauge.trace(network(), batches()[0][0])
    return UnitConsistent(inner, model, graph=graph, gauge=gauge.LayerGauge(every=2), **given)


COORDINATES: dict[str, Any] = {
    "input-scaled": lambda inner, model, **given: InputScaled(inner, model, every=2, floor=0.1, hold=True, **given),
    "preconditioned": lambda inner, model, **given: Preconditioned(inner, model, every=2, **given),
    "unit-consistent": unit_consistent,
    "whitened": lambda inner, model, **given: Whitened(inner, model, every=2, **given),
}
INNER = {"adamw": adamw, "sgd": sgd}
CASES = [(name, inner) for name in COORDINATES for inner in INNER]


def shared(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard

    plan = {
        "embed": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": parallel.SequenceParallel(),
        "up": parallel.ColwiseParallel(input_layouts=Shard(1)),
        "down": parallel.RowwiseParallel(),
    }
    return parallel.parallelize_module(model, mesh, plan)


def train(model: nn.Module, optimizer: Any, data: list[tuple[Tensor, Tensor]]) -> Weights:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    return {name: getattr(p, "full_tensor", p.clone)().detach() for name, p in model.named_parameters()}


def every_loop(rank: int, folder: Path) -> dict[str, Any]:
    flat = distributed.device_mesh.init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}
    for name, inner in CASES:
        model = shared(network(), flat)
        optimizer = COORDINATES[name](INNER[inner](model), model)
        found[f"{name}-{inner}"] = train(model, optimizer, batches())
        found[f"covered-{name}"] = {**optimizer.coverage().treated, **optimizer.coverage().skipped}
    for name in COORDINATES:
        found[f"resumed-{name}"] = resumed(name, flat, folder / f"own-{name}")
        found[f"named-{name}"] = resumed(name, flat, folder / name, checkpoints.save, checkpoints.load)
    return found


def save_own(model: nn.Module, optimizer: Any, folder: Path) -> None:
    torch.save([model.state_dict(), optimizer.state_dict()], f"{folder}-{distributed.get_rank()}")


def load_own(model: nn.Module, optimizer: Any, folder: Path) -> None:
    states = torch.load(f"{folder}-{distributed.get_rank()}", weights_only=False)
    for each, state in zip((model, optimizer), states, strict=True):
        each.load_state_dict(state)


def resumed(name: str, mesh: Any, folder: Path, save: Any = save_own, load: Any = load_own) -> Weights:
    """From what each process has saved, or from one checkpoint of both, of which each has columns of its own."""
    model, again = (shared(network(), mesh) for _ in range(2))
    optimizer, other = (COORDINATES[name](adamw(each), each) for each in (model, again))
    train(model, optimizer, batches()[:4])
    save(model, optimizer, folder)
    load(again, other, folder)
    return train(again, other, batches()[4:])


def alone(name: str, inner: str) -> Weights:
    model, given = network(), {} if name == "unit-consistent" else {"skip": ["up", "down"]}
    return train(model, COORDINATES[name](INNER[inner](model), model, **given), batches())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return on_processes(2, every_loop, folder, folder)


@pytest.mark.parametrize(("name", "inner"), CASES)
def test_tensor_parallel_processes_are_one_that_leaves_these_layers_alone_where_rows_count(ranks, name, inner):
    wanted = alone(name, inner)
    for rank in ranks:
        assert deviation(rank[f"{name}-{inner}"], wanted) <= EXACT
    bare = network()
    assert deviation(train(bare, INNER[inner](bare), batches()), wanted) > DIFFERENT


@pytest.mark.parametrize("name", COORDINATES)
@pytest.mark.parametrize("how", ["resumed", "named"])
def test_tensor_parallel_resumes_from_what_processes_have_saved_each_and_together(ranks, name, how):
    for rank in ranks:
        assert deviation(rank[f"{how}-{name}"], alone(name, "adamw")) <= EXACT


@pytest.mark.parametrize("name", [name for name in COORDINATES if name != "unit-consistent"])
def test_coverage_says_which_layers_are_dealt_out(ranks, name):
    for rank in ranks:
        found = rank[f"covered-{name}"]
        assert "DTensor" not in found["head.weight"]
        assert found["norm.weight"] == "LayerNorm is not a layer whose rows are known"
        for layer in ("up", "down"):
            assert found[f"{layer}.weight"].startswith("a DTensor, but not one of fully_shard")
            assert found[f"{layer}.bias"] == "a bias without its weight"
