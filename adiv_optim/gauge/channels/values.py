"""The values that flow along a traced graph, and how each parameter was found to move with the channels."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from .channels import Channels, pinned

#: Parameters with more elements than this, used as an activation, are pinned rather than given a channel each.
_LARGEST_ACTIVATION = 2**20


@dataclass(frozen=True, eq=False)
class Activation:
    """A tensor whose entry x moves to x · exp(s[channel])."""

    shape: tuple[int, ...]
    channels: Tensor  # ids, one dimension for each of `shape`, of size 1 along those they do not vary along

    @classmethod
    def constant(cls, shape: Iterable[int]) -> "Activation":
        """One that no scale touches."""
        shape = tuple(shape)
        return cls(shape, pinned(len(shape)))


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter, or a view of it with dimensions swapped, added or repeated."""

    name: str  # the first in the model
    base: Tensor  # a contiguous meta tensor of the parameter's shape
    view: Tensor  # a meta tensor that is to `base` as the view is to the parameter

    @property
    def core(self) -> tuple[int, ...]:
        """The view's shape with size 1 along the dimensions that only repeat."""
        return tuple(size if stride else 1 for size, stride in zip(self.view.shape, self.view.stride(), strict=True))

    def axes(self) -> list[int] | None:
        """Return, for each dimension of the parameter, the view's that it became (−1: size 1); None if cut up."""
        found = list(zip(self.core, self.view.stride(), strict=True))
        own = list(zip(self.base.shape, self.base.stride(), strict=True))
        if self.view.storage_offset() or any(pair[0] > 1 and pair not in found for pair in own):
            return None
        return [found.index(pair) if pair[0] > 1 else -1 for pair in own]

    @property
    def plain(self) -> bool:
        """Whether no dimension moved."""
        return self.view.shape == self.base.shape and self.view.stride() == self.base.stride()


@dataclass(frozen=True, eq=False)
class Buffer:
    """A buffer of the model: a constant, unless it is a normaliser's running statistics."""

    name: str
    shape: tuple[int, ...]


Value: TypeAlias = Any  # Activation | Parameter | Buffer | number | list of them


@dataclass(frozen=True, eq=False)
class Use:
    """One way a parameter moves: w · exp(power · (s[plus] − s[minus])) of `w.view(shape)`."""

    kind: str
    shape: tuple[int, ...]
    plus: Tensor
    minus: Tensor
    counted: bool = False
    power: int = 1
    why: str = ""  # of a use that lets the parameter move with nothing


class Uses:
    """Collects how parameters and running statistics move; two uses of one must agree, or all is pinned."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.parameters: dict[str, Use] = {}
        self.buffers: dict[str, Use] = {}
        self.inexact: list[str] = []  # normalisers whose eps changes their output once their input is rescaled

    def parameter(
        self, parameter: Parameter, kind: str, plus: Tensor, minus: Tensor | None = None, *, counted: bool = False
    ) -> None:
        """Note a use; `plus` and `minus` (pinned if None) are laid out as the parameter's view is."""
        axes = parameter.axes()
        assert axes is not None  # the interpreter makes no Parameter of one that is cut up
        plus, minus = (_laid_out(index, axes) for index in (plus, pinned(plus.dim()) if minus is None else minus))
        kind += "" if parameter.plain else f" as {axes}"
        self._note(parameter.name, self.parameters, Use(kind, tuple(parameter.base.shape), plus, minus, counted))

    def grouped(self, parameter: Parameter, kind: str, shape: tuple[int, ...], plus: Tensor, minus: Tensor) -> None:
        """Note a use as a convolution's weight, viewed as (groups, …)."""
        use = Use(f"{kind} {tuple(plus.shape)}", shape, plus, minus, counted=True)
        self._note(parameter.name, self.parameters, use)

    def fixed(self, parameter: Parameter, why: str) -> None:
        """Note a use that lets the parameter move with nothing."""
        zeros = pinned(parameter.base.dim())
        self._note(parameter.name, self.parameters, Use("fixed", tuple(parameter.base.shape), zeros, zeros, why=why))

    def buffer(self, buffer: Buffer, ids: Tensor, power: int) -> None:
        """Note that a running statistic moves by s to some power."""
        self._note(buffer.name, self.buffers, Use(f"power {power}", buffer.shape, ids, pinned(1), power=power))

    def _note(self, name: str, uses: dict[str, Use], use: Use) -> None:
        old = uses.setdefault(name, use)
        if old.kind == use.kind:
            why = f"both uses of {name} must move it alike"
            self.channels.join(old.plus, use.plus, why)
            self.channels.join(old.minus, use.minus, why)
        else:
            for index in (old.plus, old.minus, use.plus, use.minus):
                self.channels.pin(index, f"{name} is used in ways that do not move it alike")

    def activation(self, value: Value) -> Activation:
        """Return a value as an activation; a parameter's elements become channels of their own."""
        if isinstance(value, Activation):
            return value
        if isinstance(value, Buffer):
            return Activation.constant(value.shape)
        assert isinstance(value, Parameter)
        if value.base.numel() > _LARGEST_ACTIVATION:
            self.fixed(value, f"an activation of more than {_LARGEST_ACTIVATION:,} elements")
            return Activation.constant(value.view.shape)
        ids = self.channels.fresh(value.name, value.core)
        self.parameter(value, "activation", ids)
        return Activation(tuple(value.view.shape), ids)


def _laid_out(index: Tensor, axes: list[int]) -> Tensor:
    """Bring an index laid out as a view is into the parameter's own layout."""
    kept = [axis for axis in axes if axis >= 0]
    index = index.permute([*kept, *(axis for axis in range(index.dim()) if axis not in kept)])
    sizes = iter(index.shape)
    return index.reshape([next(sizes) if axis >= 0 else 1 for axis in axes])
