"""Calls of layers whose rows wait in the graph until a gradient comes back, and are gone with it if none does."""

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import backward_pass, is_batched, keeps_graph, reaches


class Reading:
    """The sums of what one call has read. Layers that read the same tensor share it, and then what they add it to.

    Args:
        sums: never changed in place.
        rows: how many rows they are of.
        memory: what the layer remembered then, or None: nothing.
        version: that of the tensor.
    """

    __slots__ = ("__weakref__", "arrived", "joined", "memory", "readers", "rows", "sums", "version")

    def __init__(self, sums: list[Tensor], rows: int, memory: list[Tensor] | None, version: int) -> None:
        self.sums, self.rows, self.memory, self.version = sums, rows, memory, version
        #: The layers that have it, by their ids, and whether a gradient has come to one of them.
        self.readers, self.arrived = set[int](), False
        #: Sums that it was added to, and these sums then: equal for all layers that had the same.
        self.joined: tuple[list[Tensor] | None, list[Tensor]] | None = None

    def added_to(self, before: list[Tensor] | None, memory: list[Tensor] | None) -> list[Tensor]:
        """Sums with these added, the very same list for layers that have had one list, and remember the same."""
        if memory is not self.memory:
            return self._sum(before)
        if self.joined is None or self.joined[0] is not before:
            self.joined = before, self.sums if before is None else self._sum(before)
        return self.joined[1]

    def _sum(self, before: list[Tensor] | None) -> list[Tensor]:
        return [*self.sums] if before is None else [a + b for a, b in zip(self.sums, before, strict=True)]


#: Of every tensor that layers have read, the last reading of each kind; it lives as long as the graph of its calls.
_readings: MutableMapping[Tensor, dict[Any, "weakref.ref[Reading]"]] = WeakTensorKeyDictionary()


class Readings:
    """What layers have made of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        # Whoever else has the memory may write there without a new version of the tensor: numpy, another process.
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
        self.kept = plain and not tensor.is_inference() and _is_torchs_own(tensor)

    def get(self, kind: Any, layer: object, memory: list[Tensor] | None) -> Reading | None:
        """A reading that may serve a layer as well.

        Not after a gradient has come, or if the layer has had it: whoever writes to a tensor by `.data` does so between
        passes, when nothing needs its numbers any more.
        """
        reading = _readings.get(self.tensor, {}).get(kind, lambda: None)() if self.kept else None
        if reading is None or reading.arrived or id(layer) in reading.readers:
            return None
        return reading if reading.version == self.tensor._version and reading.memory is memory else None

    def keep(self, kind: Any, reading: Reading) -> None:
        """Let other layers have it."""
        if self.kept:
            _readings.setdefault(self.tensor, {})[kind] = weakref.ref(reading)


def _is_torchs_own(tensor: Tensor) -> bool:
    return tensor.untyped_storage().resizable() and not (tensor.device.type == "cpu" and tensor.is_shared())


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been written to; tensors of inference mode do not know."""
    return -1 if tensor.is_inference() else tensor._version


class Call:
    """A hook on the graph: one call of a layer, which counts when a backward pass goes by it to the layer's weight.

    A pass that creates a graph may reach the weight later by the derivatives it makes and not by the output, as a loss
    on derivatives by the inputs does; so the gradients that it brings are watched in their turn.
    """

    __slots__ = ("layer", "node", "outer", "own", "reading", "window")

    def __init__(self, layer: Any, reading: Reading, weight: Tensor) -> None:
        self.layer, self.reading = weakref.ref(layer), reading
        # fully_shard has put its own part of the weight in place again if it is applied to the very layer.
        self.node = None if hasattr(weight, "placements") else get_gradient_edge(weight).node
        self.own = weight is layer.weight
        #: The pass that a reentrant checkpoint calls the layer in again: its own pass is a part of that.
        self.outer = backward_pass()
        #: The layer's window that it was counted in.
        self.window = -1

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> Any:
        if all(gradient is None for gradient in gradients):
            return None
        layer, reading = self.layer(), self.reading
        if layer is None or reading is None:
            return None
        reading.arrived = True
        # With is_grads_batched the gradients cannot be watched. "grad" has no number: such a pass writes no .grad, so
        # that None there does not say that somebody has cleared it.
        how = "grad" if self.node is None or is_batched(*gradients) else reaches(self.node)
        if how:
            number = backward_pass() if self.outer < 0 else self.outer
            with torch.no_grad():
                self.window = layer.arrive(reading, self.window, number if self.own and how == "backward" else None)
        if not keeps_graph():
            self.reading = None  # nothing else can come, though the nodes may live on with a loss
        return tuple(map(self._watched, gradients)) if torch.is_grad_enabled() else None

    def _watched(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or is_batched(gradient):
            return gradient
        gradient = gradient.view_as(gradient) if gradient.requires_grad else gradient.detach().requires_grad_()
        gradient.register_hook(self._derivative)
        return gradient

    def _derivative(self, gradient: Tensor) -> Tensor | None:
        found = self((gradient,))
        return None if found is None else found[0]


def nodes_of(output: Any) -> set[Any]:
    """The nodes of the graph that made what a layer returned."""
    return {tensor.grad_fn for tensor in _tensors(output)} - {None}


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _tensors(part)


def weight_of(module: nn.Module, weight: Tensor) -> Tensor:
    """The weight that a module was just called with: functional_call and fully_shard put others in its place."""
    present = module._parameters.get("weight")
    return weight if present is None else present
