"""What processes hold of a sharded tensor, and sums over processes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

#: A torch.distributed.ProcessGroup, which a torch built without distributed does not know; None is the default one.
Group = Any


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this process holds, to be read or written: all of them where it is not sharded."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def holders(parameter: Any) -> Group:
    """The processes that hold the other rows of a sharded parameter; None where this one holds all."""
    for dim, placement in enumerate(getattr(parameter, "placements", ())):
        if placement.is_shard():
            return parameter.device_mesh.get_group(dim)
    return None


class Processes:
    """The processes whose rows count together.

    Args:
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for the default group.

    Raises:
        ValueError: a mesh of several dimensions, or a group that this process is not in.
    """

    def __init__(self, what: str, group: Any) -> None:
        self.given = group
        if getattr(group, "ndim", 1) != 1:
            raise ValueError(
                f"{what}: process_group is a mesh of {group.ndim} dimensions; choose one, mesh['data'], or give the "
                "group of several, mesh['replicate', 'shard']._flatten()."
            )
        if group is not None and distributed.get_rank(self.group) < 0:
            raise ValueError(
                f"{what}: rank {distributed.get_rank()} is not in process_group; give each process the group that it "
                "is itself in, whose processes train the same layers."
            )

    @property
    def group(self) -> Group:
        """The group."""
        return self.given.get_group() if hasattr(self.given, "get_group") else self.given

    @property
    def several(self) -> bool:
        """Whether there are others to add up with."""
        return distributed.is_available() and distributed.is_initialized()

    def __repr__(self) -> str:
        return repr(self.given)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Processes":
        return self  # a group is a connection, which cannot be copied

    def __getstate__(self) -> dict[str, Any]:
        if self.given is not None and not hasattr(self.given, "get_group"):
            raise TypeError(
                "an optimizer with a process_group cannot be pickled; save its state_dict(), or give the group as a "
                "DeviceMesh of one dimension."
            )
        return vars(self)


def add_up(tensors: Iterable[Tensor], group: Group = None) -> None:
    """Add tensors up over the processes of a group, in place, by one all-reduce for each dtype."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        joined = torch.cat([tensor.flatten() for tensor in same])
        distributed.all_reduce(joined, group=group)
        for tensor, total in zip(same, joined.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(total.view_as(tensor))
