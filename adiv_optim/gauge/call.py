"""What the rules of operations work with: activations, views of parameters, and the call of an operator on them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils import _pytree as pytree

from .channels import Channels, pinned
from .graph import Entry

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
class ParameterView:
    """A parameter, or a view with dimensions swapped, added or repeated; maybe masked, or times a number.

    What uses it decides on its channels.
    """

    name: str  # the parameter's first in the model
    base: Tensor  # a contiguous meta tensor of the parameter's shape
    view: Tensor  # a meta tensor that is to `base` as the view is to the parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """The view's shape."""
        return tuple(self.view.shape)

    @property
    def distinct_shape(self) -> tuple[int, ...]:
        """The view's shape with size 1 along the dimensions that only repeat."""
        return tuple(size if stride else 1 for size, stride in zip(self.shape, self.view.stride(), strict=True))

    def axes(self) -> list[int] | None:
        """Return where in the view each dimension of the parameter is, −1 if it has size 1; None if one is cut up."""
        of_view = list(zip(self.distinct_shape, self.view.stride(), strict=True))
        of_base = list(zip(self.base.shape, self.base.stride(), strict=True))
        if self.view.storage_offset() or any(pair[0] > 1 and pair not in of_view for pair in of_base):
            return None
        return [of_view.index(pair) if pair[0] > 1 else -1 for pair in of_base]

    def to_base(self, ids: Tensor) -> Tensor:
        """Lay out ids as the parameter is, given as the view is, perhaps with more dimensions of size 1 in front."""
        axes = self.axes()
        assert axes is not None  # a view that cuts a parameter up is an Activation
        ids = ids.reshape(ids.shape[ids.dim() - self.view.dim() :])
        kept = [axis for axis in axes if axis >= 0]
        repeated = [axis for axis in range(ids.dim()) if axis not in kept]
        return ids.permute([*kept, *repeated]).reshape([ids.shape[axis] if axis >= 0 else 1 for axis in axes])


Value: TypeAlias = Any  # Activation | ParameterView | number | list of them


@dataclass(frozen=True, eq=False)
class Call:
    """An operator, its arguments by the names of its schema, and the shapes of its outputs."""

    operator: Any
    name: str  # without overload or in-place underscore, as "conv2d"
    arguments: dict[str, Value]
    output: Any  # a fake tensor, or a tuple of them, or None
    label: str  # in messages: the name, and the path of the module that ran it
    channels: Channels  # of the whole network

    def __getitem__(self, name: str) -> Value:
        """Return an argument by its name, or None where the operator has none of that name."""
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
        """Return the channels of an argument; of a parameter each element gets a new one."""
        if isinstance(value, Activation):
            return value.channels
        if value.base.numel() > LARGEST_ACTIVATION:
            self.pin(value, f"more than {LARGEST_ACTIVATION:,} elements, used as an activation")
            return pinned(len(value.shape))
        ids = self.channels.fresh(value.distinct_shape)
        self.move(value, ids, expected_log_weight=mean_log_uniform(math.prod(value.base.shape[1:])))
        return ids

    def join_along(self, value: Value, dims: Iterable[int], why: str) -> Tensor:
        """Join an argument's channels along some dimensions, and return them with size 1 there."""
        return self.channels.join_along(self.ids(value), dims, f"{why} {self.label}")

    def ids_along(self, value: Value, axis: int) -> Tensor:
        """Return an argument's channels along one axis, a vector, and join those along all others."""
        others = [dim for dim in range(len(value.shape)) if dim != axis % len(value.shape)]
        return self.join_along(value, others, "positions of one channel at").flatten().expand(value.shape[axis])

    def result(self, ids: Tensor) -> Any:
        """Return the output with these channels, aligned at its last dimension; further outputs are constants."""
        ids = self.channels.compress(to_dims(ids, len(self.shape)))
        first = Activation(self.shape, ids)
        return first if isinstance(self.output, Tensor) else [first, *self.constants()[1:]]

    def result_along(self, ids: Tensor, axis: int) -> Any:
        """Return the output with a vector of channels along one axis."""
        shape = [1] * len(self.shape)
        shape[axis] = -1
        return self.result(ids.view(shape))

    def constants(self) -> Any:
        """Return the output, or all outputs, as tensors that no scale touches."""
        if isinstance(self.output, (tuple, list)):
            return [Activation.constant(part.shape) if isinstance(part, Tensor) else part for part in self.output]
        return Activation.constant(self.output.shape) if isinstance(self.output, Tensor) else None

    def pin(self, value: Value, why: str = "") -> None:
        """Pin the channels of one argument; a parameter is then moved by none."""
        if isinstance(value, Activation):
            self.channels.pin(value.channels, why or self.label)
        elif isinstance(value, ParameterView):
            self.move(value, pinned(len(value.shape)), why=(why or self.label,))

    def pin_all(self, why: str = "") -> Any:
        """Pin every input and output: the rule for every operation that is not homogeneous."""
        for value in pytree.tree_leaves(self.arguments):
            self.pin(value, why)
        return self.constants()

    def move(self, parameter: ParameterView, plus: Tensor, minus: Tensor | None = None, **settings: Any) -> None:
        """Record that a parameter moves by `plus` − `minus`, ids as of `to_base`; without `minus` by `plus` alone."""
        minus = pinned(parameter.base.dim()) if minus is None else parameter.to_base(minus)
        use = Entry(parameter.base.shape, parameter.to_base(plus), minus, **settings)
        self.channels.record(self.channels.parameters, parameter.name, use)


def to_dims(ids: Tensor, dims: int) -> Tensor:
    """Return ids with so many dimensions: new ones, of size 1, stand in front."""
    return ids.reshape([1] * (dims - ids.dim()) + list(ids.shape))


def mean_log_uniform(fan_in: int) -> float:
    """Return the mean of log|w| of weights as PyTorch draws them, U(−a, a) with a = 1/√fan_in."""
    return -math.log(fan_in) / 2 - 1
