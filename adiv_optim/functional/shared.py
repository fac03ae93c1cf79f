"""Checks, autocast, norms and slices of a batch, for the Functions of linear layers and convolutions."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .._device import wide_dtype
from .._torch import functorch

#: The most slices in which a temporary of a tensor's size is built.
SLICES = 8
#: About how many numbers a slice has at least.
SLICE_NUMBERS = 2**19


class _OnceOnly(Function):
    """Identity whose derivative raises, also where torch's `once_differentiable` is silent: under torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(tensor if tensor is None else tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grad_outputs):
        raise RuntimeError(
            "a corrected layer was differentiated twice: its parameter gradients are not derivatives of the "
            "loss, so their own derivative means nothing. Where second derivatives are wanted, use correction=None, "
            "detach(model) first, or wrap the optimizer in Whitened, Preconditioned, InputScaled or UnitConsistent, "
            "which leave the model's gradients alone."
        )


def once_only(*tensors: Tensor | None) -> Any:
    """Pass tensors through; differentiating through them again raises a RuntimeError."""
    # Grad mode is off in a backward that keeps no graph, where there is nothing to guard.
    return _OnceOnly.apply(*tensors) if torch.is_grad_enabled() else tensors


def apply_function(function: type[Function], *arguments: Any, label: str) -> Tensor:
    """Apply a Function whose last argument is the layer's label in messages.

    Under torch.compile around vmap, a Function's forward is inlined and its backward is lost: the gradients would be
    plain, without a word. Run eagerly they are right, and fullgraph=True says that it cannot have the whole graph.
    """
    if not torch.compiler.is_compiling():
        return function.apply(*arguments, label)
    if any(isinstance(argument, Tensor) and functorch.is_batchedtensor(argument) for argument in arguments):
        return _apply_eagerly(function, *arguments, label=label)
    # A label in the graph would be guarded on: blocks that share one compiled graph would each be compiled anew.
    return function.apply(*arguments, "a compiled layer")


_apply_eagerly = torch.compiler.disable(apply_function)


def may_train(*parameters: Tensor | None) -> bool:
    """Whether a parameter may get a gradient; if none does, torch's own function is enough, and keeps no input."""
    # A compiler finds the needs of a backward by itself, and the tensors of a torch.func transform do not say.
    if torch.compiler.is_compiling():
        return True
    if torch.is_inference_mode_enabled():
        return False
    requires_grad = any(parameter is not None and parameter.requires_grad for parameter in parameters)
    return requires_grad or functorch.peek_interpreter_stack() is not None


def squared_norm(input: Tensor, dim: int) -> Tensor:
    """Return |x|², the sum of squares over one dimension, in float32 at least; a large input is taken in slices."""
    dtype = wide_dtype(input)
    if dim % input.dim() in (0, input.dim() - 1):
        return torch.linalg.vector_norm(input, dim=dim, dtype=dtype).square()
    # vector_norm is slow on the CPU along a dimension in the middle.
    return torch.cat([input[samples].to(dtype).square().sum(dim) for samples in batch_slices(input)])


def box_sum(tensor: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Sum over the window that a convolution without padding reads, axis by axis of the trailing dimensions."""
    for dim, (size, step, gap) in enumerate(zip(kernel_size, stride, dilation, strict=True), start=-len(kernel_size)):
        reach = tensor.shape[dim] - gap * (size - 1)
        # Indexed in place: with the axis moved to the end, the gradient would be laid out across the image.
        behind = (slice(None),) * (-1 - dim)
        windows: list[Any] = [(..., slice(start, start + reach, step), *behind) for start in range(0, gap * size, gap)]
        tensor = reduce(torch.add, [tensor[window] for window in windows])
    return tensor


def padded(tensor: Tensor, padding: Sequence[int]) -> Tensor:
    """Pad both ends of the trailing dimensions with zeros; without any padding return the tensor itself."""
    sides = [side for size in reversed(padding) for side in (size, size)]
    return F.pad(tensor, sides) if any(sides) else tensor


def batch_slices(tensor: Tensor) -> list[slice]:
    """Cut dimension 0 into slices, so that no temporary is as large as a large batch."""
    count = max(1, min(SLICES, tensor.numel() // SLICE_NUMBERS))
    size = max(1, math.ceil(len(tensor) / count))
    return [slice(start, start + size) for start in range(0, max(1, len(tensor)), size)]


def cast_by_autocast(input: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast as torch.autocast would for a matrix product, but differentiably, and before a Function saves its input."""
    device, tensors = input.device.type, (input, *others)
    # Autocast knows no meta device.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(_cast(tensor, dtype) for tensor in tensors)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor  # float64 is left alone, as torch's own autocast leaves it
    return tensor.to(dtype)


def check_input(label: str, input: Tensor) -> None:
    """Raise a TypeError for an input that no correction is defined on."""
    if input.layout != torch.strided or input.is_nested or not input.is_floating_point():
        kind = "nested" if input.is_nested else input.layout
        raise TypeError(
            f"{label}: input is a {kind} tensor of {input.dtype}; a correction needs dense rows of real floating-point "
            "numbers. Convert it, as by float(), to_dense() or to_padded_tensor(0.0), name the layer in skip, or pass "
            "correction=None."
        )
