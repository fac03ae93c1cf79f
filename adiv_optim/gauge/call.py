"""One operation of a traced graph, as the rules see it, and the values that go in and out."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils import _pytree as pytree

from .graph import Channels, Entry, pinned

#: Parameters with more elements than this, used as an activation, are pinned rather than given a channel each.
LARGEST_ACTIVATION = 2**20


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


class Uses:
    """Collects how parameters and running statistics move; where two uses of a parameter disagree, both are pinned."""

    def __init__(self) -> None:
        self.channels = Channels()
        self.parameters: dict[str, Entry] = {}
        self.buffers: dict[str, Entry] = {}

    def parameter(
        self, parameter: Parameter, kind: str, plus: Tensor, minus: Tensor | None = None, **settings: Any
    ) -> None:
        """Note a use; `plus` and `minus` (pinned if None) are laid out as the parameter's view is."""
        axes = parameter.axes()
        assert axes is not None  # a view that cuts a parameter up is no Parameter
        plus, minus = (_laid_out(index, axes) for index in (plus, pinned(plus.dim()) if minus is None else minus))
        kind += "" if parameter.plain else f" as {axes}"
        self.note(self.parameters, parameter.name, Entry(parameter.base.shape, plus, minus, kind=kind, **settings))

    def fixed(self, parameter: Parameter, why: str) -> None:
        """Note a use that lets the parameter move with nothing."""
        zeros = pinned(parameter.base.dim())
        self.note(self.parameters, parameter.name, Entry(parameter.base.shape, zeros, zeros, why=(why,), kind="fixed"))

    def note(self, uses: dict[str, Entry], name: str, use: Entry) -> None:
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


@dataclass(frozen=True, eq=False)
class Call:
    """An operator, its arguments by the names of its schema, and the shapes of its outputs."""

    operator: Any
    name: str  # without overload or in-place underscore, as "conv2d"
    arguments: dict[str, Value]
    output: Any  # a fake tensor, or a tuple of them, or None
    where: str  # the path of the module that ran it
    uses: Uses  # of the parameters so far

    def __getitem__(self, name: str) -> Value:
        return self.arguments.get(name)

    @property
    def channels(self) -> Channels:
        """The channels so far."""
        return self.uses.channels

    @property
    def first(self) -> Value:
        """The first argument."""
        return next(iter(self.arguments.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output, or of the first of several."""
        return tuple((self.output if isinstance(self.output, Tensor) else self.output[0]).shape)

    @property
    def label(self) -> str:
        """The name of this operation in messages."""
        return self.located(self.name)

    def located(self, event: str) -> str:
        """Say in which module an event is, for messages."""
        return f"{event} in {self.where}" if self.where else event

    def tensors(self) -> list[Activation | Parameter]:
        """List the arguments that are tensors, in lists too."""
        return [leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, (Activation, Parameter))]

    def is_constant(self, value: Value) -> bool:
        """Whether no scale touches an argument now or later: a number, a buffer, or a pinned activation."""
        is_pinned = isinstance(value, Activation) and self.channels.is_pinned(value.channels)
        return is_pinned or isinstance(value, (int, float, complex))

    def ids(self, value: Value) -> Tensor:
        """Return the channels of an argument, used as an activation."""
        return self.uses.activation(value).channels

    def share(self, value: Value, dims: Iterable[int], why: str) -> Tensor:
        """Join an argument's channels along some dimensions, and return them with size 1 there."""
        return self.channels.share(self.ids(value), dims, f"{why} {self.label}")

    def result(self, ids: Tensor) -> Any:
        """Return the output with these channels, aligned at the last dimension; further outputs are constants."""
        ids = self.channels.compress(to_dims(ids, len(self.shape)))
        first = Activation(self.shape, ids)
        return first if isinstance(self.output, Tensor) else [first, *self.constants()[1:]]

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
            self.uses.fixed(value, why or self.label)

    def pin_all(self, why: str = "") -> Any:
        """Pin every input and output: the rule for every operation that is not homogeneous."""
        for value in self.tensors():
            self.pin(value, why)
        return self.constants()

    def vector(self, value: Value, axis: int) -> Tensor:
        """Return the channels along one axis, shared along all others, one for each position."""
        x = self.uses.activation(value)
        others = [dim for dim in range(len(x.shape)) if dim != axis % len(x.shape)]
        return self.share(x, others, "positions of one channel at").flatten().expand(x.shape[axis])

    def along(self, ids: Tensor, axis: int) -> Any:
        """Return the output with a vector of channels along one axis."""
        shape = [1] * len(self.shape)
        shape[axis] = -1
        return self.result(ids.view(shape))

    def fresh(self, value: Parameter, shape: Iterable[int]) -> Tensor:
        """Return new channels, named after the module of a parameter."""
        return self.channels.fresh(value.name.rpartition(".")[0] or self.where, shape)

    def bias(self, value: Value, ids: Tensor) -> None:
        """Let a bias move with the output channels."""
        if isinstance(value, Parameter) and value.core == tuple(ids.shape):
            self.uses.parameter(value, "bias", ids)
        elif value is not None:
            self.channels.join(self.ids(value), ids, f"bias of {self.label}")


def to_dims(ids: Tensor, dims: int) -> Tensor:
    """Give ids as many dimensions, the new ones in front."""
    return ids.reshape([1] * (dims - ids.dim()) + list(ids.shape))


def uniform(fan_in: int) -> float:
    """Return the mean of log|w| of weights as PyTorch draws them, U(−a, a) with a = 1/√fan_in."""
    return -math.log(fan_in) / 2 - 1


def _laid_out(index: Tensor, axes: list[int]) -> Tensor:
    """Bring an index laid out as a view is into the layout of the parameter."""
    kept = [axis for axis in axes if axis >= 0]
    index = index.permute([*kept, *(axis for axis in range(index.dim()) if axis not in kept)])
    sizes = iter(index.shape)
    return index.reshape([next(sizes) if axis >= 0 else 1 for axis in axes])
