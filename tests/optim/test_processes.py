"""Which processes' inputs count together, and how parameters must be sharded."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

from adiv_optim import GradientOnly, InputScaled, Preconditioned, Proportional, UnitConsistent, Whitened, gauge
from tests.helpers.loops import Weights, adamw, deviation, images, network, sgd, train, weights
from tests.helpers.processes import needs_distributed, on_two_processes

on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard needs a GPU in this torch"
)
pytestmark = [needs_distributed, pytest.mark.usefixtures("in_float64")]

EACH = {"whitened": Whitened, "input-scaled": InputScaled, "preconditioned": Preconditioned}
each_wrapper = pytest.mark.parametrize("wrapper", EACH.values(), ids=EACH)


def error_of(build: Any) -> str:
    try:
        build()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "accepted"


def pipeline(rank: int) -> dict[str, Any]:
    """The weights of this process's stage, which no other process trains."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    groups = [distributed.new_group([0]), distributed.new_group([1])]
    found: dict[str, Any] = {}
    for name, wrapper in EACH.items():
        module = network()[-1:] if rank else network()[:-1]
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.cross_entropy)
        optimizer = wrapper(adamw(module), module, every=2, process_group=groups[rank])
        for x, y in images():
            optimizer.zero_grad()
            schedule.step(target=y) if rank else schedule.step(x)
            optimizer.step()
        found[name] = weights(module)
    model = nn.Linear(4, 3)
    found["stranger"] = error_of(lambda: Whitened(sgd(model), model, process_group=groups[1 - rank]))
    if hasattr(torch.cpu.Stream, "record_event"):
        distributed.fsdp.fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (2,)))
        strided = tensor_and_fully(2)
        found["strided"] = error_of(lambda: Whitened(sgd(strided), strided))
        found["too-few"] = error_of(lambda: Whitened(sgd(model), model, process_group=groups[rank]))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pytest.importorskip("torch.distributed.pipelining")
    return on_two_processes(pipeline, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", EACH)
def test_stages_of_a_pipeline_with_other_layers_each_add_up_over_their_own_processes(ranks, name):
    model = network()
    train(model, EACH[name](adamw(model), model, every=2), images())
    whole = list(weights(model).values())
    found: Weights = {f"{rank}.{path}": value for rank in (0, 1) for path, value in ranks[rank][name].items()}
    assert deviation(found, dict(zip(found, whole, strict=True))) <= 1e-12


def test_groups_that_cannot_do_are_refused(ranks):
    for rank, found in enumerate(ranks):
        assert f"Whitened: rank {rank} is not in process_group; give each process the group" in found["stranger"]
        if "too-few" in found:
            assert "Whitened: '0.weight' of a Linear is sharded as (_StridedShard(" in found["strided"]
            assert f"Whitened: ranks [{1 - rank}] hold a part of 'weight' and are not in process" in found["too-few"]


def experts(rank: int) -> tuple[list[str], dict[str, str]]:
    """What a correction says of a model of which each process runs another part, and the gradients of all."""
    model = nn.ModuleDict({"0": nn.Linear(4, 3), "1": nn.Linear(4, 3)})
    optimizer = GradientOnly(sgd(model), model, Proportional())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            model[f"{rank}"](torch.randn(5, 4)).square().sum().backward()
            for p in model.parameters():  # as DistributedDataParallel does with find_unused_parameters
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                distributed.all_reduce(p.grad)
            optimizer.step()
    return [str(each.message) for each in said], dict(optimizer.coverage().never_seen)


def test_layers_that_other_processes_run_are_not_said_to_be_called_by_nobody(tmp_path):
    for rank, (said, never_seen) in enumerate(on_two_processes(experts, tmp_path)):
        assert said == []
        assert set(never_seen.items()) == {
            (f"{1 - rank}.{name}", "its layer has not run") for name in ("weight", "bias")
        }


def mesh(*shape: int) -> Any:
    return distributed.device_mesh.init_device_mesh(
        "cpu", shape or (1,), mesh_dim_names=("copies", "data")[-len(shape or (1,)) :]
    )


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    return distributed.fsdp.fully_shard(model, mesh=mesh(), **options)


@each_wrapper
def test_a_mesh_is_copied_and_pickled_and_a_group_is_not(one_process, wrapper):
    x = torch.randn(5, 4)
    for group in (distributed.new_group([0]), mesh()):
        model = nn.Linear(4, 3)
        optimizer = wrapper(sgd(model), model, process_group=group)
        assert f"process_group={group!r}" in repr(optimizer)
        for revive in (copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))):
            if group != mesh():
                with pytest.raises(TypeError, match=r"cannot pickle .*ProcessGroup"):
                    revive((model, optimizer))
                continue
            other, copied = revive((model, optimizer))
            for net, opt in ((model, optimizer), (other, copied)):
                net(x).square().sum().backward()
                opt.step()
                opt.zero_grad()
            assert deviation(weights(other), weights(model)) == 0


def test_a_mesh_of_several_dimensions_is_refused(one_process):
    model = nn.Linear(4, 3)
    with pytest.raises(
        ValueError, match=r"Whitened: process_group is a mesh of 2 dimensions; choose one, mesh\['data'\]"
    ):
        Whitened(sgd(model), model, process_group=mesh(1, 1))
    Whitened(sgd(model), model, process_group=mesh(1, 1)["data"])


def tensor_and_fully(size: int = 1) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    both = mesh(1, size)
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), both["data"], {"0": ColwiseParallel()})
    return distributed.fsdp.fully_shard(model, mesh=both["copies"])


def by_columns() -> nn.Module:
    from torch.distributed.tensor import Shard

    return sharded(nn.Linear(4, 3), shard_placement_fn=lambda p: Shard(p.dim() - 1))


@on_cpu
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sharded(nn.Conv1d(4, 6, 3, groups=2)), r"'weight' of a Conv1d is sharded as \(Shard\(dim=0\),\)[ ,]"),
        (by_columns, r"'weight' of a Linear is sharded as \(Shard\(dim=1\),\)[ ,]"),
        (tensor_and_fully, r"'0.weight' of a Linear is sharded as \(Shard\(dim=0\), Shard\(dim=0\)\)[ ,]"),
    ],
    ids=["groups", "columns", "tensor-and-fully"],
)  # fmt: skip
def test_shards_that_are_no_whole_rows_of_outputs_are_refused(one_process, build, message):
    model = build()
    for wrapper in EACH.values():
        with pytest.raises(ValueError, match=f"^{wrapper.__name__}: .*{message}"):
            wrapper(sgd(model), model)


@on_cpu
def test_weights_that_are_cut_twice_have_no_scales(one_process):
    graph = gauge.trace(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4))
    model = tensor_and_fully()
    with pytest.raises(ValueError, match=r"^UnitConsistent: '0.weight' is sharded as .*, cut by several dimensions"):
        UnitConsistent(sgd(model), model, graph=graph)
