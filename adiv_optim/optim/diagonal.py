"""Diagonal changes of coordinates."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .._linalg.shards import local
from .chart import Known, Map

#: Numbers worked on at once: temporaries stay in a CPU's cache, and take next to no memory on any device.
CHUNK = 2**19


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
    """

    def __init__(self, parameter: nn.Parameter, shape: tuple[int, ...], d: Tensor, e: Tensor) -> None:
        self.parameters, self.shape = [parameter], shape
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.factors = d.to(parameter.device, dtype), e.to(parameter.device, dtype)

    def enter(self, weights: Sequence[Tensor], known: Known) -> None:
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
            parameter.grad = torch.empty_like(gradient)
            self._run(_multiply, gradient, parameter.grad)
        if not known.from_zero:
            self._run(_divide, weight, parameter)

    def leave(self, weights: Sequence[Tensor], known: Known) -> None:
        """Let the weight be w + Δw' d e."""
        (parameter,), (weight,) = self.parameters, weights
        self._run(_added if known.from_zero else _stepped, weight, parameter, *known.kept[: int(known.from_zero)])

    def _run(self, kernel: Callable[..., None], read: Tensor, written: Tensor, *more: float) -> None:
        """Run a kernel over two tensors of the parameter's shape, both factors and what else it takes."""
        tensors = [local(tensor.detach()).view(self.shape) for tensor in (read, written)]
        for part in self._parts():
            kernel(*(_sliced(tensor, part) for tensor in (*tensors, *self.factors)), *more)

    def _parts(self) -> list[slice]:
        length = self.shape[0] if self.shape else 1
        step = max(1, CHUNK // max(1, math.prod(self.shape[1:])))
        return [slice(start, start + step) for start in range(0, length, step)]


def _multiply(gradient: Tensor, mapped: Tensor, d: Tensor, e: Tensor) -> None:
    torch.mul(gradient, d * e, out=mapped)


def _divide(weight: Tensor, mapped: Tensor, d: Tensor, e: Tensor) -> None:
    torch.div(weight, d * e, out=mapped)


def _added(weight: Tensor, step: Tensor, d: Tensor, e: Tensor, kept: float) -> None:
    # A step that changed nothing is +0 here, and w - (+0) is w for every w; w + 0 would make +0 of -0.
    torch.sub(weight if kept == 1 else weight.to(d.dtype) * kept, (0 - step) * (d * e), out=step)


def _stepped(weight: Tensor, mapped: Tensor, d: Tensor, e: Tensor) -> None:
    scale = d * e
    # The start of the step is computed again instead of kept, rounded to the weight's precision as it was then.
    moved = mapped - (weight / scale).to(weight.dtype)
    # What was set to zero, as pruning and proximal steps do, is zero here as well.
    new = torch.where(mapped == 0, mapped, weight + moved * scale)
    mapped.copy_(torch.where(moved == 0, weight, new))


def _sliced(tensor: Tensor, part: slice) -> Tensor:
    return tensor[part] if tensor.dim() and tensor.shape[0] > 1 else tensor
