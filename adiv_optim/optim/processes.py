"""The processes whose rows count together."""

from typing import Any

from torch import distributed

from .._linalg.shards import Group


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
