"""Undocumented names of torch that autograd and hooks need: each has a test that it exists."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass, _autograd, _current_graph_task_id, _functorch
from torch._C import _will_engine_execute_node as _is_executed
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

__all__ = [
    "DisableTorchFunctionSubclass", "FakeTensor", "backward_pass", "is_batched",
    "is_within_transform", "keeps_graph", "outside_transforms", "plain_tensor", "reaches",
]  # fmt: skip


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread; -1 outside of one."""
    return _current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the backward pass that runs now leaves its graph for another one."""
    return _autograd._get_current_graph_task_keep_graph()


def reaches(node: Any) -> str:
    """Return how the backward pass that runs now reaches a node: "backward", "grad" for torch.autograd.grad, or ""."""
    try:
        return "backward" if _is_executed(node) else ""
    except RuntimeError:  # torch's: autograd.grad is asked for the gradient of the leaf whose node this is
        return "grad"


def is_within_transform() -> bool:
    """Whether a transform of torch.func, or a level of forward-mode AD, is around."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_batched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of these is batched, as in torch.autograd.grad with is_grads_batched."""
    ask = (_functorch.is_functorch_wrapped_tensor, _functorch.is_legacy_batchedtensor)
    return any(is_so(tensor) for tensor in tensors if tensor is not None for is_so in ask)


def plain_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor without a subclass that only adds methods; one with its own __torch_dispatch__ stays."""
    kind: Any = type(tensor)
    if kind in (Tensor, nn.Parameter):
        return tensor
    if getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__:  # a proxy of torch.fx has none
        return tensor
    with DisableTorchFunctionSubclass():
        return Tensor.as_subclass(tensor, Tensor)
