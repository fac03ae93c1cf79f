"""Local parts and addresses of tensors, reads by the host, dtypes, autocast, and capture of CUDA graphs."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ._torch import is_within_transform

#: One for all calls: to make a context costs a small layer time.
_NO_CONTEXT = nullcontext()


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, to be read or written: all of it unless it is sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, gathered from every process that holds a part of it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def addresses(parameters: Iterable[Parameter]) -> list[tuple[int, int, torch.Size, bool]]:
    """Return each parameter's id, address, shape and whether it trains: equal until one of them changes."""
    return [(id(p), address(p), p.shape, p.requires_grad) for p in parameters]


def address(parameter: torch.Tensor) -> int:
    """Return the address of a parameter's memory, 0 if it has none, as on the meta device. Every step asks for it."""
    part = parameter
    if type(part) is not Parameter:  # to_local() would take longer than everything else here
        part = getattr(parameter, "_local_tensor", parameter)
        if type(part) not in (torch.Tensor, Parameter):
            return 0
    return part.data_ptr() if part.layout is torch.strided else 0


def on_accelerator(tensor: Tensor) -> bool:
    """Whether a tensor is not on the CPU: there calls cost more than their arithmetic, up to large matrices."""
    return not tensor.is_cpu


def read(*tensors: Tensor) -> list[float]:
    """Return all numbers of small tensors, one after another; the host waits for the device once."""
    if not tensors:
        return []
    numbers = torch.cat([t.detach().flatten().to(tensors[0].device) for t in tensors])
    # tolist() of torch 2.9 does not look into what torch.func.grad wraps.
    return [number.item() for number in numbers] if is_within_transform() else numbers.tolist()


def has_gradient(parameter: Parameter) -> bool:
    """Whether a parameter has a gradient that is not 0; waits for the device."""
    part = None if parameter.grad is None else local(parameter.grad)
    # A process that holds no part of the gradient cannot tell, and takes it for one that is not 0.
    return part is not None and (not part.numel() or any(read(part.any())))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return a tensor's dtype, or float32 where that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor in the precision of `wide_dtype`."""
    return tensor.to(wide_dtype(tensor))


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the most precise dtype of a device: float64, but on Apple's float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def widest(tensor: Tensor) -> Tensor:
    """Return a tensor in the precision of `widest_dtype`."""
    return tensor.to(widest_dtype(tensor.device))


def with_float64(device: torch.device) -> torch.device:
    """Return the device, or the CPU where it has no float64."""
    return device if widest_dtype(device) == torch.float64 else torch.device("cpu")


def to_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU if its device has none."""
    return tensor.to(with_float64(tensor.device), torch.float64)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context that disables autocast; it does nothing on the meta device, which has none.

    The backward pass needs it too: torch.compile traces it under the autocast of the forward pass.
    """
    is_enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_enabled else _NO_CONTEXT


def refuse_capture(caller: str, action: str, tensor: Tensor) -> None:
    """Raise while a CUDA graph, or an XPU's, is captured: replays would lack `action`, such as "counts its steps"."""
    if tensor.is_cpu or torch.compiler.is_compiling():
        return
    is_capturing = getattr(getattr(torch, tensor.device.type, None), "is_current_stream_capturing", None)
    if is_capturing is not None and is_capturing():
        raise RuntimeError(
            f"{caller} {action}, which the replay of a CUDA graph would not; run this part eagerly, or use "
            "GradientOnly, which has no state."
        )
