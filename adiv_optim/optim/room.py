"""Memory that is used again from step to step."""

import torch
from torch import Tensor


class Room:
    """Memory for what lasts as long as a step, kept between steps on a CPU.

    There fresh memory comes from the operating system page by page, which costs more than what is done with it.
    Elsewhere torch's own allocator keeps what is freed, and between steps it is free for activations.

    Args:
        keep: or else all memory is fresh.
    """

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._kept: list[tuple[tuple[object, ...], Tensor]] = []
        self._given = 0

    def begin(self) -> None:
        """Take everything back that was given, and free what the last step did not ask for."""
        del self._kept[self._given :]
        self._given = 0

    def like(self, tensor: Tensor) -> Tensor:
        """Return a tensor laid out as another one, which holds anything."""
        if not self._keep or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return torch.empty_like(tensor)
        place, self._given = self._given, self._given + 1
        layout = _layout(tensor)
        if place == len(self._kept) or self._kept[place][0] != layout:
            self._kept[place : place + 1] = [(layout, torch.empty_like(tensor))]
        return self._kept[place][1]


def _layout(tensor: Tensor) -> tuple[object, ...]:
    sharded = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), *sharded
