"""Numbers on the host, read with one wait for the device; and the precision that a device has."""

import torch
from torch import Tensor


def read(*tensors: Tensor) -> list[float]:
    """All numbers of small tensors, one after another; the host waits for the device once.

    Raises:
        NotImplementedError: a tensor on the meta device.
    """
    if not tensors:
        return []
    if any(tensor.is_meta for tensor in tensors):
        raise NotImplementedError(
            "this reads numbers, and a tensor on the meta device has none: give the model memory by "
            "to_empty(device=…), and then its weights."
        )
    return torch.cat([t.detach().flatten().to(tensors[0].device) for t in tensors]).tolist()


def wide(tensor: Tensor) -> torch.dtype:
    """A tensor's precision, and float32 at least: that of what is made of it."""
    return torch.promote_types(tensor.dtype, torch.float32)


def widest(device: torch.device) -> torch.dtype:
    """The most precise numbers that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def with_float64(device: torch.device) -> torch.device:
    """The device, or the CPU in the place of one that has no float64."""
    return device if widest(device) == torch.float64 else torch.device("cpu")


def double(tensor: Tensor) -> Tensor:
    """A tensor in float64, on the CPU if its device has none."""
    return tensor.to(with_float64(tensor.device), torch.float64)
