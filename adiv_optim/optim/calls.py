"""Hooks on layers, and calls whose sums wait in the graph until a gradient comes back, and go with it if none does."""

import itertools
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.fx.node import has_side_effect

from .._device import refuse_capture
from .._torch import backward_pass, is_batched, keeps_graph, reaches

#: Hooks by the tokens that stand for them in graphs.
_tokens = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Call:
    """A hook on the graph: one call of a layer, which counts when a backward pass goes by it to the layer's weight.

    Its sums wait in the graph, and go with it if no gradient comes. A pass that creates a graph may reach the weight
    later by the derivatives it makes and not by the output, as a loss on derivatives by the inputs does; so the
    gradients that it brings are watched in their turn.
    """

    __slots__ = ("covariance", "is_own", "layer", "node", "outer", "rows", "sums", "window")

    def __init__(self, layer: Any, sums: list[Tensor], rows: int, node: Any, is_own: bool) -> None:
        self.layer, self.covariance = weakref.ref(layer), layer.covariance
        self.sums, self.rows = sums, rows
        #: The weight's node in the graph, and whether that writes to .grad of the optimizer's parameter.
        self.node, self.is_own = node, is_own
        #: The pass that a reentrant checkpoint calls the layer in again: its own pass is a part of that.
        self.outer = backward_pass()
        #: The layer's window that it was counted in.
        self.window = -1

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> Any:
        layer, with_graph = self.layer(), torch.is_grad_enabled()
        if layer is None or all(gradient is None for gradient in gradients):
            return None
        # Of gradients in a batch the derivatives cannot be watched. Without its node it is not known which pass writes
        # .grad; one that does not would leave None there, as if somebody had cleared it.
        unknown = self.node is None or (with_graph and is_batched(gradients))
        if how := "grad" if unknown else reaches(self.node):
            number = backward_pass() if self.outer < 0 else self.outer
            layer.arrive(self, number if self.is_own and how == "backward" else None)
        if not keeps_graph():
            # Nothing else can come, though the nodes may live on with a loss.
            self.sums, self.rows, self.covariance = [], 0, None
        return tuple(map(self._watched, gradients)) if with_graph else None

    def _watched(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or is_batched((gradient,)):
            return gradient
        gradient = gradient.view_as(gradient) if gradient.requires_grad else gradient.detach().requires_grad_()
        gradient.register_hook(self._derivative)
        return gradient

    def _derivative(self, gradient: Tensor) -> Tensor | None:
        watched = self((gradient,))
        return None if watched is None else watched[0]


def nodes_of(output: Any) -> Collection[Any]:
    """Return the nodes of the graph that made a layer's output."""
    if isinstance(output, Tensor):
        return () if output.grad_fn is None else (output.grad_fn,)
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return {node for part in parts for node in nodes_of(part)}


def node_of(weight: Tensor) -> Any:
    """Return the node of a weight in the graphs that it is in; call it with gradients enabled."""
    # fully_shard has put its own part of the weight in place again if it is applied to the very layer.
    if hasattr(weight, "placements"):
        return None
    alias: Any = weight.view_as(weight)
    return weight.grad_fn or alias.grad_fn.next_functions[0][0]


class InputHook:
    """A forward hook that belongs to a `LayerInputs` and does nothing without it.

    A copy or a pickle of the model alone (an average of weights, a target network) does not copy it.
    """

    def __init__(self, layer: Any, place: int) -> None:
        self.layer, self.place, key = weakref.ref(layer), place, next(_tokens)
        _hooks[key] = self
        # A tensor, not a number: the graph stays the same for another hook, and the operation says that it writes to
        # it, so that no compiler drops or reorders it.
        self.token = torch.tensor([key], device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        return {"layer": _no_layer}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        layer = self.layer()
        # Not module.training: many fine-tune under eval().
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
                _count_in_graph(self.token, input)
        else:
            self.count(input, output)

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


def _no_layer() -> None:
    """Return None, as a dead weak reference does; torch.compile traces a function."""


@has_side_effect
@torch.compiler.allow_in_graph
def _count_in_graph(token: Tensor, input: Tensor) -> None:
    # Of a backend that runs the graph as it is, which is no fake tensor; checkpoints keep the token.
    _count_rows(token.clone() if type(token) is Tensor else token, input.detach())


@library.custom_op(
    "adiv_optim::count_rows",
    mutates_args=("token",),
    schema="(Tensor(a0!) token, Tensor input) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),  # the replay of a CUDA graph would not count
)
def _count_rows(token: Tensor, input: Tensor) -> None:
    hook = _hooks.get(int(token))
    if hook is not None:
        hook.count(input, None)


@_count_rows.register_fake
def _(token: Tensor, input: Tensor) -> None:
    return None
