"""Which sharded weights have a part here that can be mapped by itself, and whose rows are then added up."""

from collections.abc import Container, Sequence
from typing import Any

from torch import distributed, nn

from .._linalg.shards import cut_of, why_not_one_cut
from ..attach.layers import is_transposed, plain_type
from .processes import Processes
from .sums import InputSums


def managed_by_fsdp(model: nn.Module) -> set[nn.Module]:
    """The modules whose parameters fully_shard has dealt to processes, each of which sees rows of its own."""
    return {part for module in model.modules() if hasattr(module, "_get_fsdp_state") for part in module.modules()}


def why_replicated(parameter: Any, modules: Sequence[nn.Module], managed: Container[nn.Module]) -> str:
    """Say why a weight that tensor parallelism has left whole on every process is plain, or ""."""
    whole = hasattr(parameter, "placements") and cut_of(parameter) is None
    if not whole or any(module in managed for module in modules):
        return ""
    return "whole on every process of tensor parallelism, which may deal out the rows that it reads"


def bias_of_columns(weight: Any) -> str:
    """Say why the bias of a weight that is cut by columns is plain, or ""."""
    cut = cut_of(weight)
    return "a bias, where columns of the weight are on other processes" if cut is not None and cut.dim else ""


def refuse_shards(
    what: str, managed: Container[nn.Module], layers: Sequence[InputSums], processes: Processes | None
) -> bool:
    """Raise a ValueError if parts of a layer are not dealt as fully_shard, ColwiseParallel or RowwiseParallel do.

    A map of columns takes whole rows, all of an output's weights, and which of them is no matter; a map of blocks of
    columns takes whole blocks.

    Args:
        what: whose error it is.
        managed: the modules of `managed_by_fsdp`.
        layers: layers that are to be treated.
        processes: whose inputs are added up; None is this one alone.

    Returns:
        Whether tensor parallelism has all processes, so that all see the same rows.
    """
    parallel = [layer for layer in layers if _mesh(layer) and layer.modules[0] not in managed]
    for layer in layers:
        for parameter in layer.parameters:
            if why := _why_not(layer, parameter, parallel):
                raise ValueError(
                    f"{what}: {layer.name!r} is sharded as {_placed(parameter)}, {why}; cut weights and biases along "
                    "dimension 0 by fully_shard alone, which is its default, or linear layers by ColwiseParallel and "
                    "RowwiseParallel alone, or name this layer in skip."
                )
    alone = bool(parallel) and processes is not None and processes.given is None
    for layer in layers:
        if _mesh(layer):
            _refuse_group(what, layer, layer in parallel, processes, alone)
    return alone


def _refuse_group(what: str, layer: InputSums, parallel: bool, processes: Processes | None, alone: bool) -> None:
    """Raise a ValueError if the processes whose rows are added up are not those that see other rows of this layer."""
    holders, here = set(_mesh(layer)), distributed.get_rank()
    if processes is None:
        if not parallel:
            raise ValueError(
                f"{what}: {layer.name!r} is sharded, and with synchronize=False every process would map its rows by "
                "inputs of its own; leave synchronize=True."
            )
        return
    counted = set(distributed.get_process_group_ranks(processes.group or distributed.group.WORLD))
    if parallel and alone:
        if others := sorted(counted - holders):
            raise ValueError(
                f"{what}: {layer.name!r} is cut over ranks {sorted(holders)}, which see the same rows; whether "
                f"{others} see others cannot be told. Give process_group, the dimension of the mesh for data: "
                "mesh['data']."
            )
    elif parallel:
        if mixed := sorted(holders & counted - {here}):
            raise ValueError(
                f"{what}: ranks {mixed} of process_group hold other parts of {layer.name!r} and see the same rows; "
                "give the processes that see other rows, the dimension of the mesh for data: mesh['data']."
            )
    elif missing := sorted(holders - ({here} if alone else counted)):
        raise ValueError(
            f"{what}: ranks {missing} hold a part of {layer.name!r} and are not in process_group; what it reads "
            "must be added up over all of its mesh: give a group that has them, or leave process_group=None."
        )


def refuse_cuts(what: str, model: nn.Module) -> None:
    """Raise a ValueError if a parameter is sharded otherwise than by one cut along one of its dimensions."""
    for name, parameter in model.named_parameters():
        if why := why_not_one_cut(parameter):
            raise ValueError(
                f"{what}: {name!r} is sharded as {_placed(parameter)}, {why}; cut it once, by fully_shard or by "
                "parallelize_module alone."
            )


def _mesh(layer: InputSums) -> list[int]:
    """The ranks that a layer's weight is dealt to, none if it is not a sharded tensor."""
    mesh = getattr(layer.weight, "device_mesh", None)
    return [] if mesh is None else mesh.mesh.flatten().tolist()


def _placed(parameter: Any) -> Any:
    return getattr(parameter, "placements", "a whole")


def _why_not(layer: InputSums, parameter: Any, parallel: Sequence[InputSums]) -> str:
    """Say why what processes hold of a parameter are not rows, or blocks of columns, of the layer, or ""."""
    if _placed(parameter) != _placed(layer.weight):
        return f"a bias, where its weight is {_placed(layer.weight)}"
    if not hasattr(parameter, "placements"):
        return ""
    if why := why_not_one_cut(parameter):
        return why
    cut, kind = cut_of(parameter), plain_type(layer.modules[0])
    if layer in parallel:
        return "" if kind is nn.Linear else f"by tensor parallelism, which a {kind.__name__} has no rows in"
    if cut is None:
        return ""
    if cut.dim:
        return "not along dimension 0"
    if layer.groups > 1:
        return f"and the rows of this {kind.__name__} belong to {layer.groups} groups, each with inputs of its own"
    if is_transposed(layer.modules[0]):
        return f"and the rows of this {kind.__name__}'s weight are inputs, not outputs"
    return ""
