"""Diagonal changes of coordinates, in place and undone bit for bit."""

import math
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

from .coordinates import Map

#: Numbers worked on at once: temporaries stay in a CPU's cache, and take next to no memory on any device.
_CHUNK = 2**19
#: Parameters with fewer numbers are not worth a kernel of their own.
_FUSED = 2**17
#: The integers with as many bits, and infinity as one of them.
_BITS = {
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}


class Diagonal(Map):
    r"""w' = w / (d e) and g' = g d e, for positive d and e that broadcast to the parameter.

    Rounding makes w' d e another number than w, by a few units in the last place. That difference is kept, as
    one byte per number, and added back to the bits: a step that leaves w' alone leaves w alone, at a quarter of the
    memory (in float32) that a copy of w would take. Where rounding may lose more than that (float16, whose small
    numbers end at 6e-8; d e beyond 200) a copy of w is kept instead. Weights below 1e-42, which mapping may
    flush to zero, are the exception: they may stay there.

    Args:
        parameter: w; its gradient is mapped too.
        shape: what to view it as; it only splits the parameter's first dimension.
        greatest: see `rescale`.
        compiled: fuse each direction into one kernel by torch.compile.
    """

    def __init__(
        self, parameter: nn.Parameter, shape: tuple[int, ...], greatest: float, compiled: bool = False
    ) -> None:
        self.parameter, self.shape, self.compiled = parameter, shape, compiled
        self._kept = self._buffer(greatest)

    def rescale(self, d: Tensor, e: Tensor, greatest: float) -> None:
        """Set the factors.

        Args:
            d: broadcastable to `shape`.
            e: likewise.
            greatest: an upper bound of d e, which bounds the difference that is kept.
        """
        self.factors = d.to(self.parameter), e.to(self.parameter)
        if (self._kept.dtype, self._kept.device) != (self._kept_dtype(greatest), self.parameter.device):
            self._kept = self._buffer(greatest)

    def _kept_dtype(self, greatest: float) -> torch.dtype:
        # Three roundings make at most 4 units; where w' is subnormal half of one of its units is up to de/2 of w's.
        by_copy = self.parameter.dtype == torch.float16 or greatest / 2 + 8 >= 2**7
        return self.parameter.dtype if by_copy else torch.int8

    def _buffer(self, greatest: float) -> Tensor:
        # Kept from step to step: fresh memory costs more time than what is done in it.
        return torch.empty(self.shape, dtype=self._kept_dtype(greatest), device=self.parameter.device)

    def enter(self) -> None:
        """Divide the parameter by d e, and multiply its gradient."""
        self._run(_enter)

    def leave(self) -> None:
        """Multiply the parameter by d e again, and divide its gradient."""
        self._run(_leave)

    def _run(self, kernel: Callable[..., None]) -> None:
        weight, gradient = self.parameter.detach(), self.parameter.grad
        if gradient is not None and gradient.is_sparse:
            values, scale = gradient._values(), self._scale_at(gradient._indices()[0])
            values.mul_(scale) if kernel is _enter else values.div_(scale)
            gradient = None
        if gradient is None:  # done, or the optimizer has freed it
            gradient = torch.zeros_like(weight)
        tensors = [self._split(gradient.detach()), self._split(weight), self._kept]
        if self.compiled and self._fusible(tensors):
            _fused(kernel)(*(self._as_matrices(tensor) for tensor in (*tensors, *self.factors)))
            return
        for part in self._parts():
            kernel(*(_sliced(tensor, part) for tensor in (*tensors, *self.factors)))

    def _scale_at(self, rows: Tensor) -> Tensor:
        """D e of the rows that a sparse gradient, an embedding's, has."""
        d, e = (factor[rows] if factor.shape[0] > 1 else factor for factor in self.factors)
        return d * e

    def _fusible(self, tensors: list[Tensor]) -> bool:
        # Kernels are made for memory in one order, and round the short types elsewhere than eager code does.
        exact = self.parameter.dtype in (torch.float32, torch.float64)
        return exact and self._kept.numel() >= _FUSED and all(tensor.is_contiguous() for tensor in tensors)

    def _as_matrices(self, tensor: Tensor) -> Tensor:
        """View what broadcasts to `shape` as what broadcasts to (groups, rows, columns): few kernels then fit all."""
        rows = len(self.shape) - self.parameter.dim()  # the dimension of the rows: after the groups, if there are any
        tensor = tensor.view((1,) * (len(self.shape) - tensor.dim()) + tensor.shape)
        if any(size > 1 for size in tensor.shape[rows + 1 :]):
            tensor = tensor.expand(*tensor.shape[: rows + 1], *self.shape[rows + 1 :])
        return tensor.reshape(-1 if rows else 1, tensor.shape[rows], math.prod(tensor.shape[rows + 1 :]))

    def _split(self, tensor: Tensor) -> Tensor:
        groups = len(self.shape) - tensor.dim()
        return tensor.unflatten(0, self.shape[: groups + 1]) if groups else tensor

    def _parts(self) -> Iterator[slice]:
        length = self.shape[0] if self.shape else 1
        step = max(1, _CHUNK // max(1, math.prod(self.shape[1:])))
        for start in range(0, length, step):
            yield slice(start, start + step)


def _enter(gradient: Tensor, weight: Tensor, kept: Tensor, d: Tensor, e: Tensor) -> None:
    scale = d * e
    gradient.mul_(scale)  # first: a gradient that cannot be scaled leaves the weights alone
    mapped = weight / scale
    if kept.dtype == weight.dtype:
        kept.copy_(weight)
    else:
        bits, _ = _BITS[weight.dtype]
        kept.copy_(weight.view(bits) - (mapped * scale).view(bits))
    weight.copy_(mapped)


def _leave(gradient: Tensor, weight: Tensor, kept: Tensor, d: Tensor, e: Tensor) -> None:
    scale = d * e
    gradient.div_(scale)
    if kept.dtype == weight.dtype:
        weight.copy_(torch.where(weight == kept / scale, kept, weight * scale))
        return
    # Bits within 127 of zero cannot take the difference without crossing it, nor infinite ones without ending it:
    # neither of the two differences below is negative there, and a shift spreads the sign over a mask.
    integer, infinity = _BITS[weight.dtype]
    bits, most = weight.mul_(scale).view(integer), torch.iinfo(integer)
    size = bits & most.max
    safe = (size - infinity).bitwise_and_(size.sub_(127).neg_())
    bits.add_(safe.bitwise_right_shift_(most.bits - 1).bitwise_and_(kept))


@cache
def _fused(kernel: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(kernel, dynamic=True)


def _sliced(tensor: Tensor, part: slice) -> Tensor:
    return tensor[part] if tensor.dim() and tensor.shape[0] > 1 else tensor
