"""Numbers on the host, read with one wait for the device; and what a device does: precision, autocast, graphs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

#: One for all calls: to make it costs a small layer something.
_NO_CONTEXT = nullcontext()


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


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context that autocast does not reach into; it knows no meta device.

    The backward pass needs it too: torch.compile traces that under the autocast of the forward pass.
    """
    reached = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if reached else _NO_CONTEXT


def refuse_capture(name: str, does: str, tensor: Tensor) -> None:
    """Raise while a CUDA graph, or an XPU's, is being captured: a replay would not do what Python does."""
    if tensor.is_cpu or torch.compiler.is_compiling():
        return
    capturing = getattr(getattr(torch, tensor.device.type, None), "is_current_stream_capturing", None)
    if capturing is not None and capturing():
        raise RuntimeError(
            f"{name} {does}, which the replay of a CUDA graph would not; run this part eagerly, or use a correction "
            "without memory."
        )
