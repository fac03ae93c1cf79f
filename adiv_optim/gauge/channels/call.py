"""One operation of a traced graph, as the rules see it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .channels import PINNED, Channels
from .values import Activation, Buffer, Parameter, Uses, Value


class Call:
    """An operator, its arguments by the names of its schema, and what its outputs look like.

    Args:
        operator: the torch operator, of which a shape rule may make use.
        name: its name without overload or in-place underscore, as "conv2d".
        arguments: by name, tensors replaced by what is known of them.
        output: a fake tensor, or a tuple of them, or None.
        where: path of the module that ran it, for names and messages.
        channels: the channels met so far.
        uses: the parameters met so far.
    """

    def __init__(
        self,
        operator: torch._ops.OpOverload,
        name: str,
        arguments: dict[str, Value],
        output: Any,
        where: str,
        channels: Channels,
        uses: Uses,
    ) -> None:
        self.schema: Any = getattr(operator, "_schema", None)
        self.operator, self.name, self.arguments, self.output = operator, name, arguments, output
        self.where, self.channels, self.uses = where, channels, uses

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

    @property
    def label(self) -> str:
        """What messages call this operation."""
        return f"{self.name} in {self.where}" if self.where else self.name

    def tensors(self) -> Iterator[Activation | Parameter | Buffer]:
        """Every argument that is a tensor, in lists too."""
        yield from _tensors(self.arguments.values())

    def run(self, operator: Callable[..., Any], change: Callable[[Value], Value]) -> Any:
        """Call an operator with this operation's arguments, each changed first."""
        by_keyword = {argument.name for argument in self.schema.arguments if argument.kwarg_only}
        positional = [change(value) for name, value in self.arguments.items() if name not in by_keyword]
        return operator(*positional, **{name: self.arguments[name] for name in by_keyword})

    def activation(self, value: Value) -> Activation:
        """Return an argument as an activation."""
        return self.uses.materialise(value, self.channels)

    def result(self, ids: Tensor) -> Any:
        """Return the output with these channels, aligned at the last dimension; further outputs are constants."""
        ids = self.channels.compress(ids.reshape([1] * (len(self.shape) - ids.dim()) + list(ids.shape)))
        if isinstance(self.output, Tensor):
            return Activation(tuple(self.output.shape), ids)
        return [Activation(self.shape, ids), *self.constants()[1:]]

    def constants(self) -> Any:
        """Return outputs that no scale touches."""
        if isinstance(self.output, Tensor):
            return Activation(tuple(self.output.shape), torch.full([1] * self.output.dim(), PINNED))
        if not isinstance(self.output, (tuple, list)):
            return None
        return [
            Activation(tuple(part.shape), torch.full([1] * part.dim(), PINNED)) if isinstance(part, Tensor) else part
            for part in self.output
        ]

    def pin(self, value: Value, why: str = "") -> None:
        """Pin the channels of one argument; a parameter then moves with nothing."""
        if isinstance(value, Activation):
            self.channels.pin(value.channels, why or self.label)
        elif isinstance(value, Parameter):
            self.uses.fixed(value, why or self.label)

    def pin_all(self, why: str = "") -> Any:
        """Pin every input and output: the rule for what is not homogeneous."""
        for value in self.tensors():
            self.pin(value, why)
        return self.constants()

    def vector(self, value: Activation, axis: int) -> Tensor:
        """Return the channels along one axis, shared along all others, one for each position."""
        axis %= len(value.shape)
        others = [dim for dim in range(len(value.shape)) if dim != axis]
        ids = self.channels.share(value.channels, others, f"positions of one channel at {self.label}")
        return ids.flatten().expand(value.shape[axis])

    def along(self, ids: Tensor, axis: int) -> Any:
        """Return the output with a vector of channels along one axis."""
        shape = [1] * len(self.shape)
        shape[axis] = -1
        return self.result(ids.view(shape))

    def fresh(self, value: Parameter, shape: Iterable[int]) -> Tensor:
        """Return new channels, named after the module whose parameter brings them into being."""
        return self.channels.fresh(value.name.rpartition(".")[0] or self.where, shape)

    def bias(self, value: Value, ids: Tensor) -> None:
        """Let a bias move with the output channels, a vector."""
        if isinstance(value, Parameter) and value.core == tuple(ids.shape):
            self.uses.parameter(value, "bias", ids, torch.full((1,), PINNED), counted=False)
        elif value is not None:
            self.channels.join(self.activation(value).channels, ids, f"bias of {self.label}")


def _tensors(values: Iterable[Any]) -> Iterator[Activation | Parameter | Buffer]:
    for value in values:
        if isinstance(value, (Activation, Parameter, Buffer)):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
