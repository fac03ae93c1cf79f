"""Diagonal changes of coordinates."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .._linalg.shards import local
from .chart import Known, Map

#: Numbers worked on at once: temporaries stay in a CPU's cache, and take next to no memory on any device.
CHUNK = 2**19
#: Parameters with fewer numbers are not worth a kernel of their own.
_FUSED = 2**17


class Diagonal(Map):
    r"""w' = w / (d e) and g' = g d e, for positive d and e that broadcast to the parameter.

    After the step the weight is w + (what the step changed) d e, so that a step that leaves w' alone leaves w alone,
    bit for bit. An optimizer that does not read w' steps from 0, which saves a division each way. Scales keep their
    own precision: those of float16 weights may lie outside of float16's range.

    Args:
        parameter: w; its gradient is mapped too. Of a sharded one all else is about the part that is held here.
        shape: what to view it as; it only splits the parameter's first dimension.
        d: broadcastable to `shape`.
        e: likewise.
        compiled: fuse each direction into one kernel by torch.compile.
    """

    def __init__(
        self, parameter: nn.Parameter, shape: tuple[int, ...], d: Tensor, e: Tensor, compiled: bool = False
    ) -> None:
        self.parameters, self.shape, self.compiled = [parameter], shape, compiled
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.factors = d.to(parameter.device, dtype), e.to(parameter.device, dtype)

    def enter(self, weights: Sequence[Tensor], known: Known, like: Callable[[Tensor], Tensor]) -> None:
        """Divide the parameter by d e, and give it a gradient multiplied by it."""
        (parameter,), (weight,) = self.parameters, weights
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.coalesce()
            d, e = (factor[gradient.indices()[0]] if factor.shape[0] > 1 else factor for factor in self.factors)
            parameter.grad = torch.sparse_coo_tensor(
                gradient.indices(), (gradient.values() * (d * e)).to(gradient.dtype), gradient.shape,
                is_coalesced=True,
            )  # fmt: skip
        elif gradient is not None:
            parameter.grad = like(gradient)
            self._run(_multiply, gradient, parameter.grad)
        if not known.from_zero:
            self._run(_divide, weight, parameter)

    def leave(self, weights: Sequence[Tensor], known: Known) -> None:
        """Let the weight be w + Δw' d e."""
        (parameter,), (weight,) = self.parameters, weights
        if not known.from_zero:
            self._run(_stepped, weight, parameter)
            return
        # The weight is old or new at any time: one kernel writes it, or it is copied once all parts are done.
        onto = known.aside and (len(self._parts()) == 1 or (self.compiled and self._fusible([weight, parameter])))
        if known.kept[0] == 1:
            self._run(_added, weight, parameter, onto)
        else:  # as a tensor: kernels are compiled for one value of a number
            self._run(_decayed, weight, parameter, onto, torch.tensor(known.kept[0], dtype=self.factors[0].dtype))
        if known.aside and not onto:
            weight.copy_(parameter)

    def _run(self, kernel: Callable[..., None], read: Tensor, written: Tensor, *more: Any) -> None:
        """Run a kernel over two tensors of the parameter's shape, both factors and what else it takes."""
        tensors = [local(tensor.detach()).view(self.shape) for tensor in (read, written)]
        if self.compiled and self._fusible(tensors):
            _fused(kernel)(*(self._as_matrices(tensor) for tensor in (*tensors, *self.factors)), *more)
            return
        for part in self._parts():
            kernel(*(_sliced(tensor, part) for tensor in (*tensors, *self.factors)), *more)

    def _fusible(self, tensors: list[Tensor]) -> bool:
        # Compiled kernels take contiguous memory, and round half precision in other places than eager code.
        exact = tensors[0].dtype in (torch.float32, torch.float64)
        return exact and tensors[0].numel() >= _FUSED and all(tensor.is_contiguous() for tensor in tensors)

    def _as_matrices(self, tensor: Tensor) -> Tensor:
        """View what broadcasts to `shape` as what broadcasts to (groups, rows, columns): few kernels then fit all."""
        rows = len(self.shape) - self.parameters[0].dim()  # the dimension of rows, after groups if there are any
        tensor = tensor.view((1,) * (len(self.shape) - tensor.dim()) + tensor.shape)
        if any(size > 1 for size in tensor.shape[rows + 1 :]):
            tensor = tensor.expand(*tensor.shape[: rows + 1], *self.shape[rows + 1 :])
        return tensor.reshape(-1 if rows else 1, tensor.shape[rows], math.prod(tensor.shape[rows + 1 :]))

    def _parts(self) -> list[slice]:
        length = self.shape[0] if self.shape else 1
        step = max(1, CHUNK // max(1, math.prod(self.shape[1:])))
        return [slice(start, start + step) for start in range(0, length, step)]


def _multiply(gradient: Tensor, mapped: Tensor, d: Tensor, e: Tensor) -> None:
    torch.mul(gradient, d * e, out=mapped)


def _divide(weight: Tensor, mapped: Tensor, d: Tensor, e: Tensor) -> None:
    torch.div(weight, d * e, out=mapped)


def _added(weight: Tensor, step: Tensor, d: Tensor, e: Tensor, onto: bool) -> None:
    # A step that changed nothing is +0 here, and w - (+0) is w for every w; w + 0 would make +0 of -0.
    torch.sub(weight, (0 - step) * (d * e), out=weight if onto else step)


def _decayed(weight: Tensor, step: Tensor, d: Tensor, e: Tensor, onto: bool, kept: Tensor) -> None:
    torch.sub(weight.to(d.dtype) * kept, (0 - step) * (d * e), out=weight if onto else step)


def _stepped(weight: Tensor, mapped: Tensor, d: Tensor, e: Tensor) -> None:
    scale = d * e
    # The start of the step is computed again instead of kept, rounded to the weight's precision as it was then.
    moved = mapped - (weight / scale).to(weight.dtype)
    # What was set to zero, as pruning and proximal steps do, is zero here as well.
    new = torch.where(mapped == 0, mapped, weight + moved * scale)
    mapped.copy_(torch.where(moved == 0, weight, new))


@cache
def _fused(kernel: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(kernel, dynamic=True)


def _sliced(tensor: Tensor, part: slice) -> Tensor:
    return tensor[part] if tensor.dim() and tensor.shape[0] > 1 else tensor
