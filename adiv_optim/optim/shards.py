"""Which weights that fully_shard has dealt to processes have rows here that a map of columns can be applied to."""

from collections.abc import Sequence
from typing import Any

from torch import distributed, nn

from .._linalg.shards import why_not_one_cut
from ..attach.layers import is_transposed, plain_type
from .processes import Processes
from .sums import InputSums


def refuse_shards(what: str, model: nn.Module, layers: Sequence[InputSums], processes: Processes | None) -> None:
    """Raise a ValueError if the rows of a layer are not dealt as fully_shard deals them.

    A map of columns takes whole rows, all of an output's weights; which rows is no matter.

    Args:
        what: whose error it is.
        model: whose layers they are.
        layers: layers that are to be treated.
        processes: whose inputs are added up; None is this one alone.
    """
    managed = {part for module in model.modules() if hasattr(module, "_get_fsdp_state") for part in module.modules()}
    for layer in layers:
        for parameter in layer.parameters:
            if why := _why_not(layer, parameter, managed):
                raise ValueError(
                    f"{what}: {layer.name!r} is sharded as {_placed(parameter)}, {why}; cut weights and biases along "
                    "dimension 0 by fully_shard alone, which is its default, or name this layer in skip."
                )
        mesh = getattr(layer.weight, "device_mesh", None)
        if mesh is None:
            continue
        if processes is None:
            raise ValueError(
                f"{what}: {layer.name!r} is sharded, and with synchronize=False every process would map its rows by "
                "inputs of its own; leave synchronize=True."
            )
        counted = distributed.get_process_group_ranks(processes.group or distributed.group.WORLD)
        if missing := sorted(set(mesh.mesh.flatten().tolist()) - set(counted)):
            raise ValueError(
                f"{what}: ranks {missing} hold a part of {layer.name!r} and are not in process_group; what it reads "
                "must be added up over all of its mesh: give a group that has them, or leave process_group=None."
            )


def refuse_cuts(what: str, model: nn.Module) -> None:
    """Raise a ValueError if a parameter is sharded otherwise than by one cut along one of its dimensions."""
    for name, parameter in model.named_parameters():
        if why := why_not_one_cut(parameter):
            raise ValueError(
                f"{what}: {name!r} is sharded as {_placed(parameter)}, {why}; cut it once, by "
                "fully_shard or by parallelize_module alone."
            )


def _placed(parameter: Any) -> Any:
    return getattr(parameter, "placements", "a whole")


def _why_not(layer: InputSums, parameter: Any, managed: set[nn.Module]) -> str:
    """Say why the rows that processes hold of a parameter are not rows of the layer's outputs, or ""."""
    if _placed(parameter) != _placed(layer.weight):
        return f"a bias, where its weight is {_placed(layer.weight)}"
    if not hasattr(parameter, "placements"):
        return ""
    if not managed.issuperset(layer.modules):
        return "not by fully_shard"
    kind = plain_type(layer.modules[0]).__name__
    cut = [placement for placement in parameter.placements if not placement.is_replicate()]
    if len(cut) > 1 or any(type(placement).__name__ != "Shard" or placement.dim != 0 for placement in cut):
        return "not along dimension 0 on one dimension of the mesh"
    if cut and layer.groups > 1:
        return f"and the rows of this {kind} belong to {layer.groups} groups, each with inputs of its own"
    if cut and is_transposed(layer.modules[0]):
        return f"and the rows of this {kind}'s weight are inputs, not outputs"
    return ""
