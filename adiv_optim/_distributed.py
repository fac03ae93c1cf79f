"""Several processes: where tensors are sharded, sums over processes, and whose rows count together."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ._device import local

#: A torch.distributed.ProcessGroup, which a torch built without distributed does not know; None is the default one.
Group = Any


def has_others() -> bool:
    """Whether other processes train with this one."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class Cut(NamedTuple):
    """Where a tensor is sharded."""

    dim: int  # along which dimension of it
    start: int  # its first index on this process
    group: Group  # the processes that share it, this one among them


def cut_of(tensor: Any) -> Cut | None:
    """Return where a tensor is cut that `why_not_one_cut` has nothing against; None where this process holds it all."""
    for mesh_dim, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            mesh, size = tensor.device_mesh, tensor.shape[placement.dim]
            # As torch.chunk cuts: all pieces but the last have one length.
            length = -(-size // mesh.size(mesh_dim))
            return Cut(placement.dim, min(size, length * mesh.get_local_rank(mesh_dim)), mesh.get_group(mesh_dim))
    return None


def why_not_one_cut(tensor: Any) -> str:
    """Say why a sharded tensor is not cut along one dimension into pieces in order, or ""."""
    cuts = [placement for placement in getattr(tensor, "placements", ()) if not placement.is_replicate()]
    if len(cuts) > 1:
        return "cut by several dimensions of the mesh"
    # A subclass of Shard deals pieces out in another order.
    return "" if all(type(placement).__name__ == "Shard" for placement in cuts) else "not cut into pieces in order"


def local_view(shape: tuple[int, ...], scales: Sequence[Tensor], tensor: Any) -> tuple[tuple[int, ...], list[Tensor]]:
    """Return the shape of this process's part of a tensor, and the matching parts of its scales.

    The whole tensor is viewed in `shape`, which only splits its first dimension; `scales` broadcast to that.
    """
    cut = cut_of(tensor)
    if cut is None:
        return shape, list(scales)
    parts = []
    for scale in scales:
        part = scale.view((1,) * (len(shape) - scale.dim()) + scale.shape)
        if split := len(shape) - tensor.dim():  # rows are cut anywhere within the split first dimension
            part = part.expand(*shape[: split + 1], *part.shape[split + 1 :]).flatten(0, split)
        if part.shape[cut.dim] > 1:
            part = part.narrow(cut.dim, cut.start, local(tensor).shape[cut.dim])
        parts.append(part)
    return tuple(local(tensor).shape), parts


def add_up(tensors: Iterable[Tensor], group: Group = None) -> None:
    """Add tensors up over the processes of a group, in place, by one all-reduce for each dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for batch in by_kind.values():
        joined = torch.cat([tensor.flatten() for tensor in batch])
        distributed.all_reduce(joined, group=group)
        for tensor, total in zip(batch, joined.split([tensor.numel() for tensor in batch]), strict=True):
            tensor.copy_(total.view_as(tensor))


def add_up_shards(parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Of pairs (tensor, sum) add each sum up, in place, over the processes that share the tensor; others stay."""
    by_group: dict[Group, list[Tensor]] = {}
    for tensor, total in parts:
        if (cut := cut_of(tensor)) is not None:
            by_group.setdefault(cut.group, []).append(total)
    for group, totals in by_group.items():
        add_up(totals, group)


def process_group_of(name: str, process_group: Any) -> Group:
    """Return the group of processes whose rows count together, of a ProcessGroup, a DeviceMesh or None.

    Raises:
        ValueError: a mesh of several dimensions, or a group that this process is not in; `name` opens the message.
    """
    if getattr(process_group, "ndim", 1) != 1:
        raise ValueError(
            f"{name}: process_group is a mesh of {process_group.ndim} dimensions; choose one, mesh['data'], or give "
            "the group of several, mesh['replicate', 'shard']._flatten()."
        )
    group = process_group.get_group() if hasattr(process_group, "get_group") else process_group
    if group is not None and distributed.get_rank(group) < 0:
        raise ValueError(
            f"{name}: rank {distributed.get_rank()} is not in process_group; give each process the group that it is "
            "itself in, whose processes train the same layers."
        )
    return group
