"""One operation of a traced graph, as the rules see it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .channels import Channels
from .values import Activation, Buffer, Parameter, Uses, Value


@dataclass(frozen=True, eq=False)
class Call:
    """An operator, its arguments by the names of its schema, and the shapes of its outputs."""

    operator: Any
    name: str  # without overload or in-place underscore, as "conv2d"
    arguments: dict[str, Value]
    output: Any  # a fake tensor, or a tuple of them, or None
    where: str  # the path of the module that ran it
    uses: Uses  # the parameters met so far

    def __getitem__(self, name: str) -> Value:
        return self.arguments.get(name)

    @property
    def channels(self) -> Channels:
        """The channels met so far."""
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

    def located(self, what: str) -> str:
        """Say in which module something is, for messages."""
        return f"{what} in {self.where}" if self.where else what

    def tensors(self) -> Iterator[Activation | Parameter | Buffer]:
        """Every argument that is a tensor, in lists too."""
        return _tensors(self.arguments.values())

    def run(self, operator: Callable[..., Any], change: Callable[[Value], Value]) -> Any:
        """Call an operator with this operation's arguments, each changed first."""
        by_keyword = {argument.name for argument in self.operator._schema.arguments if argument.kwarg_only}
        positional = [change(value) for name, value in self.arguments.items() if name not in by_keyword]
        return operator(*positional, **{name: self.arguments[name] for name in by_keyword})

    def is_constant(self, value: Value) -> bool:
        """Whether no scale touches an argument, whatever comes: a number, a buffer, or what is pinned."""
        fixed = isinstance(value, Activation) and self.channels.is_pinned(value.channels)
        return fixed or isinstance(value, (int, float, complex, Buffer))

    def ids(self, value: Value) -> Tensor:
        """Return the channels of an argument, used as an activation."""
        return self.uses.activation(value).channels

    def share(self, value: Value, dims: Iterable[int], why: str) -> Tensor:
        """Let an argument's channels be one along some dimensions, and return them with size 1 there."""
        return self.channels.share(self.ids(value), dims, f"{why} {self.label}")

    def result(self, ids: Tensor) -> Any:
        """Return the output with these channels, aligned at the last dimension; further outputs are constants."""
        ids = self.channels.compress(to_dims(ids, len(self.shape)))
        first = Activation(self.shape, ids)
        return first if isinstance(self.output, Tensor) else [first, *self.constants()[1:]]

    def constants(self) -> Any:
        """Return outputs that no scale touches."""
        if isinstance(self.output, Tensor):
            return Activation.constant(self.output.shape)
        if not isinstance(self.output, (tuple, list)):
            return None
        return [Activation.constant(part.shape) if isinstance(part, Tensor) else part for part in self.output]

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
        """Return new channels, named after the module whose parameter brings them into being."""
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


def _tensors(values: Iterable[Any]) -> Iterator[Activation | Parameter | Buffer]:
    for value in values:
        if isinstance(value, (Activation, Parameter, Buffer)):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
