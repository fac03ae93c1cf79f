"""Diagonal changes of coordinates, in place and undone bit for bit."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .coordinates import Map

#: Numbers worked on at once: temporaries stay in a CPU's cache, and take next to no memory on any device.
_CHUNK = 2**18
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


class Diagonal(Map):
    r"""w' = w / (d e) and g' = g d e, for positive d and e that broadcast to the parameter.

    Rounding makes w' d e another number than w, by a few units in the last place. That difference is kept, as
    one byte per number, and added back to the bits: a step that leaves w' alone leaves w alone, at a quarter of the
    memory (in float32) that a copy of w would take. Where rounding may lose more than that (float16, whose small
    numbers end at 6e-8; d e beyond 200) a copy of w is kept instead. Weights below 1e-42, which mapping may
    flush to zero, are the exception: they may stay there.

    Args:
        parameter: w; its gradient, if there is one, is mapped too.
        shape: what to view it as; it only splits the parameter's first dimension.
        greatest: see `rescale`.
    """

    def __init__(self, parameter: nn.Parameter, shape: tuple[int, ...], greatest: float) -> None:
        self.parameter, self.shape = parameter, shape
        self._kept = self._buffer(greatest)

    def rescale(self, d: Tensor, e: Tensor, greatest: float) -> None:
        """Set the factors.

        Args:
            d: broadcastable to `shape`.
            e: likewise.
            greatest: an upper bound of d e, which bounds the difference that is kept.
        """
        self.factors = d.to(self.parameter), e.to(self.parameter)
        self.inverse = 1 / self.factors[0], 1 / self.factors[1]
        if self._by_copy(greatest) != (self._kept.dtype == self.parameter.dtype):
            self._kept = self._buffer(greatest)

    def _by_copy(self, greatest: float) -> bool:
        # Four roundings and two rounded reciprocals make at most 6 units; where w' is subnormal half of one of its
        # units is up to de/2 of w's.
        return self.parameter.dtype == torch.float16 or greatest / 2 + 8 >= 2**7

    def _buffer(self, greatest: float) -> Tensor:
        # Kept from step to step: fresh memory costs more time than what is done in it.
        dtype = self.parameter.dtype if self._by_copy(greatest) else torch.int8
        return torch.empty(self.shape, dtype=dtype, device=self.parameter.device)

    def enter(self) -> None:
        """Divide the parameter by d e, and multiply its gradient."""
        self._scale_gradient(forwards=True)  # first: a gradient that cannot be scaled leaves the weights alone
        weight = self._split(self.parameter.detach())
        copied, bits = self._kept.dtype == weight.dtype, _BITS[weight.dtype]
        for part, factors, inverse in self._parts():
            w = weight[part]
            mapped = _times(w, *inverse)
            if copied:
                self._kept[part] = w
            else:
                back = _times(mapped, *factors)
                torch.sub(w.view(bits), back.view(bits), out=self._kept[part])
            w.copy_(mapped)

    def leave(self) -> None:
        """Multiply the parameter by d e again, and divide its gradient."""
        weight = self._split(self.parameter.detach())
        copied, bits = self._kept.dtype == weight.dtype, _BITS[weight.dtype]
        # Bits near zero cannot take the difference without crossing it, nor infinite ones without ending it.
        least = 2.0**7 * torch.finfo(weight.dtype).smallest_normal * torch.finfo(weight.dtype).eps
        for part, factors, inverse in self._parts():
            w, kept = weight[part], self._kept[part]
            if copied:
                untouched = w == _times(kept, *inverse)
                w.copy_(torch.where(untouched, kept, _times(w, *factors)))
                continue
            w.mul_(factors[0]).mul_(factors[1])
            size = w.abs()
            kept.mul_((size > least).logical_and_(size < math.inf))
            w.view(bits).add_(kept)
        self._scale_gradient(forwards=False)

    def _scale_gradient(self, forwards: bool) -> None:
        if self.parameter.grad is None:
            return
        gradient = self._split(self.parameter.grad.detach())
        for part, factors, inverse in self._parts():
            first, second = factors if forwards else inverse
            gradient[part].mul_(first).mul_(second)

    def _split(self, tensor: Tensor) -> Tensor:
        groups = len(self.shape) - tensor.dim()
        return tensor.unflatten(0, self.shape[: groups + 1]) if groups else tensor

    def _parts(self) -> Iterator[tuple[slice, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        """Slices of the first dimension, with the factors and the inverse factors there."""
        length = self.shape[0] if self.shape else 1
        step = max(1, _CHUNK // max(1, math.prod(self.shape[1:])))
        for start in range(0, length, step):
            part = slice(start, start + step)
            yield (
                part,
                (_sliced(self.factors[0], part), _sliced(self.factors[1], part)),
                (_sliced(self.inverse[0], part), _sliced(self.inverse[1], part)),
            )


def _times(tensor: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return (tensor * first).mul_(second)


def _sliced(factor: Tensor, part: slice) -> Tensor:
    return factor[part] if factor.dim() and factor.shape[0] > 1 else factor
