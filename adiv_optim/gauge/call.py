"""One operation of a traced graph, as the rules see it: the values that go in and out, and the channels they have."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .graph import Entry

#: The channel whose log-scale is 0: of the model's inputs and outputs, and of arguments of functions like tanh.
PINNED = 0
#: Parameters with more elements than this, used as an activation, are pinned rather than given a channel each.
LARGEST_ACTIVATION = 2**20


def pinned(dims: int) -> Tensor:
    """Return the channels of a tensor that no scale touches."""
    return torch.full([1] * dims, PINNED)


class Channels:
    """A union-find over channels, vectorised: joining tensors of ids costs no loop over channels.

    A component is named by its least id. An operation works on its arguments alone, never on all channels: a network
    that computes its weights has a channel for each of their elements. Pinned components are not merged, so that each
    channel keeps its reason. It also holds how parameters and running statistics move by the channels.
    """

    def __init__(self) -> None:
        self.made: list[tuple[str, Tensor]] = []  # each layer's name and the channels of its output
        self.parameters: dict[str, Entry] = {}
        self.buffers: dict[str, Entry] = {}
        self.count = 1
        self._parent = torch.zeros(1, dtype=torch.long)  # of a root the root itself
        self._reason = torch.zeros(1, dtype=torch.long)  # of a root: an index into _reasons; -1 while free
        self._reasons = [""]

    def fresh(self, name: str, shape: Iterable[int]) -> Tensor:
        """Return new free channels, as ids of the given shape."""
        start, shape = self.count, tuple(shape)
        self.count += math.prod(shape)
        if self.count > len(self._parent):  # doubled, so that growth costs as much as the result
            spare = self._parent.new_empty(max(self.count, 2 * len(self._parent)) - len(self._parent))
            self._parent, self._reason = torch.cat([self._parent, spare]), torch.cat([self._reason, spare])
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

    def reasons(self, ids: Tensor) -> tuple[str, ...]:
        """Return why channels are pinned, most frequent first; nothing of `PINNED` and of those that are free."""
        numbers = self._reason[self._roots(ids.flatten())]
        counts = numbers[numbers > 0].bincount()
        most_frequent = counts.argsort(descending=True)[: int(counts.count_nonzero())]
        return tuple(dict.fromkeys(self._reasons[int(number)] for number in most_frequent))

    def note(self, entries: dict[str, Entry], name: str, use: Entry) -> None:
        """Note how a parameter or buffer moves; every use of it must move it alike."""
        first = entries.setdefault(name, use)
        why = use.why[0] if use.why else f"every use of {name} must move it alike"
        if (first.shape, first.power) == (use.shape, use.power):
            self.join(first.plus, use.plus, why)
            self.join(first.minus, use.minus, why)
        else:  # one of them in a grouped convolution
            for index in (first.plus, first.minus, use.plus, use.minus):
                self.pin(index, why)


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
    """A parameter, or a view of it with dimensions swapped, added or repeated, whose channels its use will say."""

    name: str  # the first in the model
    base: Tensor  # a contiguous meta tensor of the parameter's shape
    view: Tensor  # a meta tensor that is to `base` as the view is to the parameter

    @property
    def module(self) -> str:
        """The path of the module that has it."""
        return self.name.rpartition(".")[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The view's shape."""
        return tuple(self.view.shape)

    @property
    def core(self) -> tuple[int, ...]:
        """The view's shape with size 1 along the dimensions that only repeat."""
        return tuple(size if stride else 1 for size, stride in zip(self.shape, self.view.stride(), strict=True))

    def axes(self) -> list[int] | None:
        """Return, for each dimension of the parameter, the view's that it became (−1: size 1); None if cut up."""
        of_view = list(zip(self.core, self.view.stride(), strict=True))
        of_base = list(zip(self.base.shape, self.base.stride(), strict=True))
        if self.view.storage_offset() or any(pair[0] > 1 and pair not in of_view for pair in of_base):
            return None
        return [of_view.index(pair) if pair[0] > 1 else -1 for pair in of_base]


Value: TypeAlias = Any  # Activation | Parameter | number | list of them


@dataclass(frozen=True, eq=False)
class Call:
    """An operator, its arguments by the names of its schema, and the shapes of its outputs."""

    operator: Any
    name: str  # without overload or in-place underscore, as "conv2d"
    arguments: dict[str, Value]
    output: Any  # a fake tensor, or a tuple of them, or None
    label: str  # the name, and the path of the module that ran it, in messages
    channels: Channels  # so far

    def __getitem__(self, name: str) -> Value:
        return self.arguments.get(name)

    @property
    def first(self) -> Value:
        """The first argument."""
        return next(iter(self.arguments.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output, or of the first of several."""
        return tuple((self.output if isinstance(self.output, Tensor) else self.output[0]).shape)

    def ids(self, value: Value) -> Tensor:
        """Return the channels of an argument; each element of a parameter becomes one."""
        if isinstance(value, Activation):
            return value.channels
        if value.base.numel() > LARGEST_ACTIVATION:
            self.pin(value, f"an activation of more than {LARGEST_ACTIVATION:,} elements")
            return pinned(len(value.shape))
        ids = self.channels.fresh(value.name, value.core)
        self.move(value, ids, expected_log_weight=uniform(math.prod(value.base.shape[1:])))
        return ids

    def spread(self, value: Value) -> Tensor:
        """Return the channel of every entry of an argument."""
        return self.ids(value).expand(value.shape)

    def share(self, value: Value, dims: Iterable[int], why: str) -> Tensor:
        """Join an argument's channels along some dimensions, and return them with size 1 there."""
        return self.channels.share(self.ids(value), dims, f"{why} {self.label}")

    def vector(self, value: Value, axis: int) -> Tensor:
        """Return the channels along one axis, shared along all others, one for each position."""
        others = [dim for dim in range(len(value.shape)) if dim != axis % len(value.shape)]
        return self.share(value, others, "positions of one channel at").flatten().expand(value.shape[axis])

    def result(self, ids: Tensor) -> Any:
        """Return the output with these channels, aligned at the last dimension; further outputs are constants."""
        ids = self.channels.compress(to_dims(ids, len(self.shape)))
        first = Activation(self.shape, ids)
        return first if isinstance(self.output, Tensor) else [first, *self.constants()[1:]]

    def along(self, ids: Tensor, axis: int) -> Any:
        """Return the output with a vector of channels along one axis."""
        shape = [1] * len(self.shape)
        shape[axis] = -1
        return self.result(ids.view(shape))

    def constants(self) -> Any:
        """Return outputs that no scale touches."""
        if isinstance(self.output, (tuple, list)):
            return [Activation.constant(part.shape) if isinstance(part, Tensor) else part for part in self.output]
        return Activation.constant(self.output.shape) if isinstance(self.output, Tensor) else None

    def pin(self, value: Value, why: str = "") -> None:
        """Pin the channels of one argument; a parameter then moves with nothing."""
        if isinstance(value, Activation):
            self.channels.pin(value.channels, why or self.label)
        elif isinstance(value, Parameter):
            self.move(value, pinned(len(value.shape)), why=(why or self.label,))

    def pin_all(self, why: str = "") -> Any:
        """Pin every input and output: the rule for every operation that is not homogeneous."""
        for value in pytree.tree_leaves(self.arguments):
            self.pin(value, why)
        return self.constants()

    def move(self, parameter: Parameter, plus: Tensor, minus: Tensor | None = None, **settings: Any) -> None:
        """Let a parameter move by channels laid out as its view is, behind dimensions of size 1; `minus` or pinned."""
        axes = parameter.axes()
        assert axes is not None  # a view that cuts a parameter up is no Parameter
        kept = [axis for axis in axes if axis >= 0]
        order = [*kept, *(axis for axis in range(parameter.view.dim()) if axis not in kept)]

        def laid_out(index: Tensor) -> Tensor:
            index = index.reshape(index.shape[index.dim() - len(order) :]).permute(order)
            return index.reshape([index.shape[kept.index(axis)] if axis >= 0 else 1 for axis in axes])

        minus = pinned(plus.dim()) if minus is None else minus
        use = Entry(parameter.base.shape, laid_out(plus), laid_out(minus), **settings)
        self.channels.note(self.channels.parameters, parameter.name, use)


def to_dims(ids: Tensor, dims: int) -> Tensor:
    """Give ids as many dimensions, the new ones in front."""
    return ids.reshape([1] * (dims - ids.dim()) + list(ids.shape))


def uniform(fan_in: int) -> float:
    """Return the mean of log|w| of weights as PyTorch draws them, U(−a, a) with a = 1/√fan_in."""
    return -math.log(fan_in) / 2 - 1
