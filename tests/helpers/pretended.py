"""A device that no machine has: its tensors say that they are there, are computed on the CPU, and do not mix.

For a process of its own: torch has one such backend, which it then takes for the machine's accelerator.
"""

from typing import Any

import torch
from torch import Tensor, library
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretended"
aten = torch.ops.aten
#: What takes tensors of several devices; indices may be on the CPU.
MIX = {aten.copy_, aten._to_copy, aten._copy_from, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Elsewhere(Tensor):
    """A tensor that is held on the CPU, and says that it is elsewhere."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "Elsewhere":
        about = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return Tensor._make_wrapper_subclass(cls, held.shape, device=device, **about)

    def __init__(self, held: Tensor, device: torch.device) -> None:
        self.held = held

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(function, args, kwargs or {})


def called(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do on the CPU what is asked for elsewhere, and put the results there; in place, what is changed stays itself."""
    given = [part for part in pytree.tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
    devices = {part.device for part in given if part.dim() or isinstance(part, Elsewhere)}
    if len(devices) > 1 and function.overloadpacket not in MIX:
        raise RuntimeError(f"{function} of tensors on {sorted(map(str, devices))}")
    wanted = kwargs.get("device")
    if wanted is not None:
        there = torch.device(wanted)
    elif function.overloadpacket is aten.copy_:
        there = args[0].device
    else:
        there = next((part.device for part in given if isinstance(part, Elsewhere)), torch.device("cpu"))
    if there.type == NAME and there.index is None:
        there = torch.device(NAME, 0)
    inside: dict[int, Tensor] = {}

    def bare(part: Any) -> Any:
        if isinstance(part, Elsewhere):
            inside[id(part.held)] = part
            return part.held
        return torch.device("cpu") if isinstance(part, torch.device) else part

    args, kwargs = pytree.tree_map(bare, (args, kwargs))
    found = function(*args, **kwargs)
    if function is aten._to_copy.default and found is args[0]:
        found = found.clone()

    def put(part: Any) -> Any:
        if not isinstance(part, Tensor) or there.type != NAME:
            return inside.get(id(part), part)
        if Pretending.narrow and part.dtype == torch.float64:
            raise TypeError(f"{function}: there is no float64 on this device")
        return inside[id(part)] if id(part) in inside else Elsewhere(part, there)

    return pytree.tree_map(put, found)


class Pretending(TorchDispatchMode):
    """Where tensors are made elsewhere, and CPU tensors copied there."""

    #: Whether the device lacks float64, as MPS does.
    narrow = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(function, args, kwargs or {})


def _place(device: Any) -> torch.device:
    return torch.device(NAME, torch.device(device).index or 0)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor:
    return Elsewhere(torch.empty_strided(size, stride, dtype=dtype), _place(device))


def _empty(size: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor:
    return Elsewhere(torch.empty(size, dtype=dtype), _place(device))


def _copy_from(one: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
    into, source = (part.held if isinstance(part, Elsewhere) else part for part in (other, one))
    into.copy_(source)
    return other


_setup_privateuseone_for_python_backend(NAME, backend_module=_DummyBackendModule())
#: Of what torch calls past tensors' own dispatch; it is forgotten with this object.
KERNELS = library.Library("aten", "IMPL")
for _name, _function in (
    ("empty_strided", _empty_strided),
    ("empty.memory_format", _empty),
    ("_copy_from", _copy_from),
):
    KERNELS.impl(_name, _function, "PrivateUse1")
