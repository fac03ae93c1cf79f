"""Models of which a part is on the CPU and the rest on a device that no machine has, with which nothing mixes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from adiv_optim import UnitConsistent, _device, gauge
from tests.helpers.seeds import manual_seed
from tests.wrappers import WRAPPERS, Wrapper

aten = torch.ops.aten
#: What takes tensors of several devices; indices may be on the CPU.
MIX = {aten.copy_, aten._to_copy, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
THERE = torch.device("meta")


class Elsewhere(Tensor):
    """A tensor that is held on the CPU, and says that it is on the meta device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_meta = False

    @staticmethod
    def __new__(cls, held: Tensor) -> "Elsewhere":
        about = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return Tensor._make_wrapper_subclass(cls, held.shape, device=THERE, **about)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(function, args, kwargs or {})


class Pretending(TorchDispatchMode):
    """Where tensors are made elsewhere, and CPU tensors copied there."""

    #: Whether the device lacks float64, as MPS does.
    narrow = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(function, args, kwargs or {})


def called(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do on the CPU what is asked for elsewhere, and put the results there; in place, what is changed stays itself."""
    given = [part for part in pytree.tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
    devices = {part.device for part in given if part.dim() or isinstance(part, Elsewhere)}
    if len(devices) > 1 and function.overloadpacket not in MIX:
        raise RuntimeError(f"{function} of tensors on {sorted(map(str, devices))}")
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"])
    else:
        given = given[:1] if function.overloadpacket is aten.copy_ else given
        there = THERE if any(isinstance(part, Elsewhere) for part in given) else torch.device("cpu")
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
        if not isinstance(part, Tensor) or there != THERE:
            return inside.get(id(part), part)
        if Pretending.narrow and part.dtype == torch.float64:
            raise TypeError(f"{function}: there is no float64 on this device")
        return inside[id(part)] if id(part) in inside else Elsewhere(part)

    return pytree.tree_map(put, found)


class Split(nn.Module):
    def __init__(self, first: Any, second: Any, dtype: torch.dtype) -> None:
        super().__init__()
        manual_seed(0)
        features = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten())
        head = nn.Sequential(nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
        self.features, self.head = features.to(dtype).to(first), head.to(dtype).to(second)
        self.devices = first, second

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.devices
        return self.head(self.features(x.to(first)).to(second))


def layer_gauge(inner, model, example, graph):
    return UnitConsistent(inner, model, gauge=gauge.LayerGauge(), graph=graph)


ALL = {**WRAPPERS, "layer-gauge": Wrapper(layer_gauge)}


def path(name: str, first: Any, second: Any, dtype: torch.dtype) -> list[Tensor]:
    """The weights after a few steps, some of which measure."""
    x, y = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(1)).to(dtype), torch.arange(6) % 3
    model, traced = Split(first, second, dtype), {}
    if name in ("unit-consistent", "layer-gauge"):
        traced = {"graph": gauge.trace(Split("cpu", "cpu", dtype), x[:1])}
    optimizer = ALL[name](torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1), model, x[:1], **traced)
    for step in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(x + step), y.to(second)).backward()
        optimizer.step()
    return [torch.tensor(p.detach().flatten().tolist()) for p in model.parameters()]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["two", "narrow"])
def test_a_model_on_two_devices_or_one_that_lacks_float64_steps_as_on_the_cpu(name, dtype, tolerance, monkeypatch):
    wanted, narrow = path(name, "cpu", "cpu", dtype), dtype == torch.float32
    made = torch.tensor
    # torch's own would leave the numbers out.
    monkeypatch.setattr(torch, "tensor", lambda data, device="cpu", **given: made(data, **given).to(device))
    if narrow:
        monkeypatch.setattr(Pretending, "narrow", True)
        monkeypatch.setattr(_device, "widest_dtype", lambda at: torch.float32 if at == THERE else torch.float64)
    with Pretending():
        found = path(name, THERE, THERE if narrow else "cpu", dtype)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_what_is_on_different_devices_does_not_mix():
    with Pretending(), pytest.raises(RuntimeError, match=r"add_.* of tensors on \['cpu', 'meta'\]"):
        torch.ones(2, device=THERE).add_(torch.ones(2))
