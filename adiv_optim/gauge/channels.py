"""The channels of a traced model, the values that carry them, and the parameters that move with them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: The channel whose log-scale is 0: of the model's inputs and outputs, and of arguments of functions like tanh.
PINNED = 0
#: Why that channel is pinned.
CONSTANT = "a constant"
#: Parameters with more elements than this, used as an activation, are pinned rather than given a channel each.
LARGEST_ACTIVATION = 2**20


def pinned(dims: int) -> Tensor:
    """Return the channels of a tensor that no scale touches."""
    return torch.full([1] * dims, PINNED)


class Channels:
    """A union-find over channels, vectorised: joining tensors of ids costs no loop over channels.

    A component is named by its least id. An operation works on its arguments alone, never on all channels: a network
    that computes its weights has a channel for each of their elements. Pinned components are not merged, so that each
    channel keeps its reason.
    """

    def __init__(self) -> None:
        self.made: list[tuple[str, Tensor]] = []  # each layer's name and the channels of its output
        self.count = 1
        self._parent = torch.zeros(1, dtype=torch.long)  # of a root the root itself
        self._reason = torch.zeros(1, dtype=torch.long)  # of a root: an index into _reasons; -1 while free
        self._reasons = [CONSTANT]

    def fresh(self, name: str, shape: Iterable[int]) -> Tensor:
        """Return new free channels, as ids of the given shape."""
        start, shape = self.count, tuple(shape)
        self.count += torch.Size(shape).numel()
        if self.count > len(self._parent):  # doubled, so that growth costs as much as the result
            spare = max(self.count, 2 * len(self._parent)) - len(self._parent)
            self._parent = torch.cat([self._parent, torch.empty(spare, dtype=torch.long)])
            self._reason = torch.cat([self._reason, torch.empty(spare, dtype=torch.long)])
        ids = torch.arange(start, self.count)
        self._parent[start : self.count] = ids
        self._reason[start : self.count] = -1
        self.made.append((name, ids))
        return ids.view(shape)

    def find(self, ids: Tensor) -> Tensor:
        """Return the name of each channel's component; `PINNED` where it is pinned."""
        root = self._roots(ids)
        return root.masked_fill(self._reason[root] >= 0, PINNED)

    def _roots(self, ids: Tensor) -> Tensor:
        root = self._parent[ids]
        while not torch.equal(parent := self._parent[root], root):
            root = parent
            self._parent[ids] = root
        return root

    def join(self, first: Tensor, second: Tensor, why: str) -> None:
        """Join two tensors of channels, broadcast against each other."""
        first, second = (ids.flatten() for ids in torch.broadcast_tensors(self.find(first), self.find(second)))
        differ = (first != second).nonzero()[:, 0]
        first, second = low, high = first[differ], second[differ]
        while len(low):
            low, high = torch.minimum(low, high), torch.maximum(low, high)
            self._parent.scatter_reduce_(0, high, low, "amin")
            low, high = self._roots(low), self._roots(high)
            differ = (low != high).nonzero()[:, 0]
            low, high = low[differ], high[differ]
        joined = torch.cat([first, second])
        pinned = joined[(self._parent[joined] == PINNED) & (joined != PINNED)]
        if len(pinned):
            self._parent[pinned] = pinned
            self._reason[pinned] = len(self._reasons)
            self._reasons.append(why)

    def pin(self, ids: Tensor, why: str) -> None:
        """Fix log-scales at 0."""
        self.join(ids, torch.tensor(PINNED), why)

    def share(self, ids: Tensor, dims: Iterable[int], why: str) -> Tensor:
        """Join channels along some dimensions, and return them with size 1 there."""
        for dim in dims:
            if ids.shape[dim] > 1:
                first = ids.narrow(dim, 0, 1)
                self.join(ids, first, why)
                ids = first
        return ids

    def compress(self, ids: Tensor) -> Tensor:
        """Return components with size 1 along every dimension that they do not vary along."""
        for dim in range(ids.dim()):
            # A stride of 0 marks the work of `expand`, and saves comparing: the batch and the positions of an image.
            if ids.shape[dim] > 1 and ids.stride(dim) == 0:
                ids = ids.narrow(dim, 0, 1)
        ids = self.find(ids)
        for dim in range(ids.dim()):
            if ids.shape[dim] > 1 and bool((ids == (first := ids.narrow(dim, 0, 1))).all()):
                ids = first
        return ids

    def is_pinned(self, ids: Tensor) -> bool:
        """Whether none of the channels is free."""
        return not self.find(ids).any()

    def reasons(self, ids: Tensor) -> tuple[str, ...]:
        """Return why channels are pinned, most frequent first; nothing of those that are free."""
        numbers = self._reason[self._roots(ids.flatten())]
        counts = numbers[numbers >= 0].bincount()
        most_frequent = counts.argsort(descending=True)[: int(counts.count_nonzero())]
        return tuple(dict.fromkeys(self._reasons[int(number)] for number in most_frequent))


@dataclass(frozen=True, eq=False)
class Activation:
    """A tensor whose entry x moves to x · exp(s[channel])."""

    shape: tuple[int, ...]
    channels: Tensor  # a dimension for each of `shape`, of size 1 along those that they do not vary along
    buffer: str = ""  # the name of the buffer that it is

    @classmethod
    def constant(cls, shape: Iterable[int], buffer: str = "") -> "Activation":
        """Return an activation that no scale touches."""
        shape = tuple(shape)
        return cls(shape, pinned(len(shape)), buffer)


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
        of_view = list(zip(self.core, self.view.stride(), strict=True))
        of_base = list(zip(self.base.shape, self.base.stride(), strict=True))
        if self.view.storage_offset() or any(pair[0] > 1 and pair not in of_view for pair in of_base):
            return None
        return [of_view.index(pair) if pair[0] > 1 else -1 for pair in of_base]

    @property
    def plain(self) -> bool:
        """Whether no dimension moved."""
        return self.view.shape == self.base.shape and self.view.stride() == self.base.stride()


Value: TypeAlias = Any  # Activation | Parameter | number | list of them


@dataclass(frozen=True, eq=False)
class Use:
    """A way in which a parameter moves: w · exp(power · (s[plus] − s[minus])) of `w.view(shape)`."""

    kind: str
    shape: tuple[int, ...]
    plus: Tensor
    minus: Tensor
    counted: bool = False
    power: int = 1
    why: str = ""  # of a use that lets the parameter move with nothing
    expected_log_weight: float = 0.0  # these two as in `Entry`
    matrix: bool = False


class Uses:
    """Collects how parameters and running statistics move; where two uses of a parameter disagree, both are pinned."""

    def __init__(self) -> None:
        self.channels = Channels()
        self.parameters: dict[str, Use] = {}
        self.buffers: dict[str, Use] = {}
        self.inexact: list[str] = []  # normalisers whose eps changes their output once their input is rescaled

    def parameter(
        self, parameter: Parameter, kind: str, plus: Tensor, minus: Tensor | None = None, **settings: Any
    ) -> None:
        """Note a use; `plus` and `minus` (pinned if None) are laid out as the parameter's view is."""
        axes = parameter.axes()
        assert axes is not None  # a view that cuts a parameter up is no Parameter
        plus, minus = (_laid_out(index, axes) for index in (plus, pinned(plus.dim()) if minus is None else minus))
        kind += "" if parameter.plain else f" as {axes}"
        self.note(self.parameters, parameter.name, Use(kind, tuple(parameter.base.shape), plus, minus, **settings))

    def fixed(self, parameter: Parameter, why: str) -> None:
        """Note a use that lets the parameter move with nothing."""
        zeros = pinned(parameter.base.dim())
        use = Use("fixed", tuple(parameter.base.shape), zeros, zeros, why=why)
        self.note(self.parameters, parameter.name, use)

    def note(self, uses: dict[str, Use], name: str, use: Use) -> None:
        """Note how a parameter moves, or a running statistic."""
        old = uses.setdefault(name, use)
        if old.kind == use.kind:
            why = f"both uses of {name} must move it alike"
            self.channels.join(old.plus, use.plus, why)
            self.channels.join(old.minus, use.minus, why)
        else:
            for index in (old.plus, old.minus, use.plus, use.minus):
                self.channels.pin(index, f"{name} is used in ways that do not move it alike")

    def activation(self, value: Value) -> Activation:
        """Return a value as an activation; each element of a parameter becomes a channel."""
        if isinstance(value, Activation):
            return value
        assert isinstance(value, Parameter)
        if value.base.numel() > LARGEST_ACTIVATION:
            self.fixed(value, f"an activation of more than {LARGEST_ACTIVATION:,} elements")
            return Activation.constant(value.view.shape)
        ids = self.channels.fresh(value.name, value.core)
        self.parameter(value, "activation", ids, expected_log_weight=uniform(math.prod(value.base.shape[1:])))
        return Activation(tuple(value.view.shape), ids)


def uniform(fan_in: int) -> float:
    """Return the mean of log|w| of weights as PyTorch draws them, U(−a, a) with a = 1/√fan_in."""
    return -math.log(fan_in) / 2 - 1


def _laid_out(index: Tensor, axes: list[int]) -> Tensor:
    """Bring an index laid out as a view is into the layout of the parameter."""
    kept = [axis for axis in axes if axis >= 0]
    index = index.permute([*kept, *(axis for axis in range(index.dim()) if axis not in kept)])
    sizes = iter(index.shape)
    return index.reshape([next(sizes) if axis >= 0 else 1 for axis in axes])
