"""Hooks on layers, and calls whose rows wait in the graph until a gradient comes back, and go with it if none does."""

import weakref
from collections.abc import Collection, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import backward_pass, is_batched, keeps_graph, reaches
from ..functional.shared import refuse_capture
from .graph_rows import count_in_graph, token_of


class Reading:
    """The sums of what one call has read. Layers that read the same tensor share it, and then what they add it to.

    Args:
        sums: never changed in place.
        rows: how many rows they are of.
        covariance: what the layer remembered then, or None: nothing.
        version: that of the tensor.
    """

    __slots__ = ("__weakref__", "arrived", "covariance", "joined", "readers", "rows", "sums", "version")

    def __init__(self, sums: list[Tensor], rows: int, covariance: object, version: int) -> None:
        self.sums, self.rows, self.covariance, self.version = sums, rows, covariance, version
        #: The layers that have it, by their ids, and whether a gradient has come to one of them.
        self.readers, self.arrived = set[int](), False
        #: Sums that it was added to, and these sums then: equal for all layers that had the same.
        self.joined: tuple[list[Tensor] | None, list[Tensor]] | None = None

    def added_to(self, before: list[Tensor] | None, covariance: object) -> list[Tensor]:
        """Sums with these added, the very same list for layers that have had one list, and remember the same."""
        if covariance is not self.covariance:
            return self._sum(before)
        if self.joined is None or self.joined[0] is not before:
            self.joined = before, self.sums if before is None else self._sum(before)
        return self.joined[1]

    def _sum(self, before: list[Tensor] | None) -> list[Tensor]:
        return [*self.sums] if before is None else [a + b for a, b in zip(self.sums, before, strict=True)]


#: Of every tensor that layers have read, the last reading of each kind; it lives as long as the graph of its calls.
_readings: MutableMapping[Tensor, dict[Any, "weakref.ref[Reading]"]] = WeakTensorKeyDictionary()


def readings_of(tensor: Tensor) -> dict[Any, "weakref.ref[Reading]"]:
    """The last reading of each kind that layers have made of a tensor."""
    # Others cannot be keys, have no version, or have numbers elsewhere.
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_nested
    return _readings.setdefault(tensor, {}) if plain and not tensor.is_inference() else {}


def may_serve(reading: Reading, tensor: Tensor, layer: object, covariance: object) -> bool:
    """Whether what one layer has made of a tensor is what another one would make.

    Not after a gradient has come, nor twice for one layer: who writes to a tensor by `.data` does so between passes,
    when nothing needs its numbers any more. And not where others have the memory, numpy or another process, and may
    write there without a new version of the tensor.
    """
    if reading.arrived or id(layer) in reading.readers or reading.covariance is not covariance:
        return False
    storage = tensor.untyped_storage()
    alone = storage.resizable() and not (tensor.device.type == "cpu" and storage.is_shared())
    return alone and reading.version == tensor._version


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been written to; tensors of inference mode do not know."""
    return -1 if tensor.is_inference() else tensor._version


class Call:
    """A hook on the graph: one call of a layer, which counts when a backward pass goes by it to the layer's weight.

    A pass that creates a graph may reach the weight later by the derivatives it makes and not by the output, as a loss
    on derivatives by the inputs does; so the gradients that it brings are watched in their turn.
    """

    __slots__ = ("layer", "node", "outer", "own", "reading", "window")

    def __init__(self, layer: Any, reading: Reading, node: Any, own: bool) -> None:
        self.layer = weakref.ref(layer)
        self.reading: Reading | None = reading
        #: The weight's node in the graph, and whether that writes to .grad of what the optimizer holds.
        self.node, self.own = node, own
        #: The pass that a reentrant checkpoint calls the layer in again: its own pass is a part of that.
        self.outer = backward_pass()
        #: The layer's window that it was counted in.
        self.window = -1

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> Any:
        layer, reading, with_graph = self.layer(), self.reading, torch.is_grad_enabled()
        if layer is None or reading is None or all(gradient is None for gradient in gradients):
            return None
        reading.arrived = True
        # Of gradients in a batch the derivatives cannot be watched. Without its node it is not known which pass writes
        # .grad; one that does not would leave None there, as if somebody had cleared it.
        unknown = self.node is None or (with_graph and is_batched(gradients))
        how = "grad" if unknown else reaches(self.node)
        if how:
            number = backward_pass() if self.outer < 0 else self.outer
            self.window = layer.arrive(reading, self.window, number if self.own and how == "backward" else None)
        if not keeps_graph():
            self.reading = None  # nothing else can come, though the nodes may live on with a loss
        return tuple(map(self._watched, gradients)) if with_graph else None

    def _watched(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or is_batched((gradient,)):
            return gradient
        gradient = gradient.view_as(gradient) if gradient.requires_grad else gradient.detach().requires_grad_()
        gradient.register_hook(self._derivative)
        return gradient

    def _derivative(self, gradient: Tensor) -> Tensor | None:
        found = self((gradient,))
        return None if found is None else found[0]


def nodes_of(output: Any) -> Collection[Any]:
    """The nodes of the graph that made what a layer returned."""
    if isinstance(output, Tensor):
        return () if output.grad_fn is None else (output.grad_fn,)
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return {node for part in parts for node in nodes_of(part)}


def weight_of(module: nn.Module, weight: Tensor) -> Tensor:
    """The weight that a module was just called with: functional_call and fully_shard put others in its place."""
    present = module._parameters.get("weight")
    return weight if present is None else present


def node_of(weight: Tensor) -> Any:
    """The node of a weight in the graphs that it is in; call it with gradients enabled."""
    # fully_shard has put its own part of the weight in place again if it is applied to the very layer.
    if not weight.requires_grad or hasattr(weight, "placements"):
        return None
    alias: Any = weight.view_as(weight)
    return weight.grad_fn or alias.grad_fn.next_functions[0][0]


class InputHook:
    """A forward hook that belongs to a `LayerInputs` and does nothing without it.

    A copy or a pickle of the model alone (an average of weights, a target network) does not copy it.
    """

    def __init__(self, layer: Any, place: int) -> None:
        self.layer, self.place = weakref.ref(layer), place
        self.token = token_of(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"layer": _gone}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        layer = self.layer()
        # Not module.training: fine-tuning under eval() is usual.
        if layer is None or not torch.is_grad_enabled() or torch.compiler.is_exporting() or torch.jit.is_tracing():
            return
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                f"{layer.name!r} is called by nn.DataParallel on a copy of the layer, in a thread of its own, whose "
                "rows the optimizer cannot add up. Use DistributedDataParallel, by torchrun; or one device."
            )
        # By whatever name: nn.Linear calls it input, transformers' Conv1D x.
        input = args[0] if args else next(iter(kwargs.values()))
        if torch.compiler.is_dynamo_compiling() and type(input) in (Tensor, nn.Parameter):
            # Both are guarded on: between measurements there is another graph, without any of this.
            if layer.armed or not layer.called:
                count_in_graph(self.token, input)
        else:
            self.count(input, output)

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # which torch.jit.script asks every hook for
            raise AttributeError(
                "torch.jit.script cannot compile the hook that counts what this layer reads; call detach() on the "
                "optimizer first."
            )
        raise AttributeError(name)

    def count(self, input: Tensor, output: Any) -> None:
        """Count the rows of one call; for `output` see `LayerInputs.add`."""
        layer = self.layer()
        # A backward does not come through inference mode, though gradients may be enabled in it.
        if layer is None or torch.is_inference_mode_enabled():
            return
        refuse_capture(layer.name, "remembers its inputs", input)
        layer.called = True
        if layer.armed:
            layer.add(layer.modules[self.place], input, output)


def _gone() -> None:
    """Called, it returns None, as a weak reference to something gone does; and torch.compile traces it."""
