"""One operation of a traced graph, as the rules see it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from .channels import Activation, Channels, Parameter, Uses, Value


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
