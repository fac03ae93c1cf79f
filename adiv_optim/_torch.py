"""Undocumented names of torch for autograd and torch.func: a test says that each exists."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass, _autograd, _current_graph_task_id
from torch._C import _functorch as functorch
from torch._C import _will_engine_execute_node as _is_executed
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

__all__ = [
    "DisableTorchFunctionSubclass", "FakeTensor", "backward_pass", "functorch", "is_batched",
    "is_exporting", "is_within_transform", "keeps_graph", "outside_transforms", "plain_tensor", "reached_by",
]  # fmt: skip


def is_exporting() -> bool:
    """Whether torch.export traces: by its flag, as torch 2.9's own function is true under torch.compile too."""
    return torch.compiler._is_exporting_flag


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread; -1 outside of one."""
    return _current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the backward pass that runs now leaves its graph for another one."""
    return _autograd._get_current_graph_task_keep_graph()


def reached_by(node: Any) -> str:
    """Return the call whose backward pass, which runs now, reaches a node: "backward", "grad", or "" if none does."""
    try:
        return "backward" if _is_executed(node) else ""
    except RuntimeError:  # torch's: torch.autograd.grad is asked for the gradient of the leaf whose node this is
        return "grad"


def is_within_transform() -> bool:
    """Whether this code runs within a transform of torch.func or a level of forward-mode AD."""
    return functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_batched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of these is batched, as in torch.autograd.grad with is_grads_batched."""
    present = [tensor for tensor in tensors if tensor is not None]
    return any(functorch.is_functorch_wrapped_tensor(t) or functorch.is_legacy_batchedtensor(t) for t in present)


def plain_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor without a subclass that only adds methods; one with its own __torch_dispatch__ stays."""
    kind: Any = type(tensor)
    if kind in (Tensor, nn.Parameter):
        return tensor
    if getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__:  # a proxy of torch.fx has none
        return tensor
    with DisableTorchFunctionSubclass():
        return Tensor.as_subclass(tensor, Tensor)
