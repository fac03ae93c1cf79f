"""One forward and backward pass of a model, with the calls of its layers."""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import describe
from ..rows.models import label
from .modules import copied, generator_states


class Call(NamedTuple):
    """A layer's call: what it was given and what it read, behind its pre-hooks, as that was then; and dL/dz."""

    inputs: tuple[Tensor, ...]
    read: tuple[Tensor, ...]
    grad_output: Tensor


class Pass(NamedTuple):
    """The loss, the gradients and the calls of layers of one forward and backward pass."""

    loss: Tensor  # detached
    gradients: dict[str, Tensor]  # parameter path → gradient, where the loss depends on it; none shares memory
    calls: dict[str, list[Call]]  # layer path → its calls on which the loss depends
    refused: dict[str, str]  # layer path → why a call of it has no rows
    changed: set[str]  # paths of layers whose output another hook changes


class Batch(NamedTuple):
    """A batch and its loss, loss_fn(model(inputs), targets)."""

    loss_fn: Callable[[Any, Any], Tensor]
    inputs: Any  # a tensor, a tuple of arguments, or a dict of keyword arguments
    targets: Any


def differentiate(model: nn.Module, batch: Batch, layers: dict[str, nn.Module], *, freeze_layers: bool = False) -> Pass:
    """Run a model forward and backward once, and keep the inputs of layers and the gradients of their outputs.

    With `freeze_layers` the parameters of these layers are constants while the layers run, so that the gradient of a
    shared parameter is only the part of the other modules, and a call without rows is an error.
    """
    recorder = _Recorder(layers, freeze_layers)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    is_named = isinstance(batch.inputs, Mapping)
    keywords, unnamed = (batch.inputs, ()) if is_named else ({}, batch.inputs)
    arguments = unnamed if isinstance(unnamed, tuple) else (unnamed,)
    # A graph that torch.compile has made before does not call these hooks.
    with torch.enable_grad(), recorder.hooks(), torch.compiler.set_stance("force_eager"):
        output = model(*map(copied, arguments), **{name: copied(value) for name, value in keywords.items()})
        for path, reason in recorder.refused.items() if freeze_layers else ():
            name = f"{label(path)} ({type(layers[path]).__name__})"
            raise ValueError(f"{name} has no Jacobian: {reason}; name other `layers`.")
        loss = _checked_loss(batch.loss_fn(output, batch.targets))
        recorded = list(recorder.calls)
        _refuse_reentrant_checkpoints(loss)
        outputs = [output for *_, output in recorded]
        # Within the hooks: a checkpoint must recompute the same graph.
        computed = torch.autograd.grad(loss, [*outputs, *parameters.values()], allow_unused=True)
    calls: dict[str, list[Call]] = {}
    for (path, call_inputs, read, _), gradient in zip(recorded, computed, strict=False):
        if gradient is not None and path not in recorder.refused:
            calls.setdefault(path, []).append(Call(call_inputs, read, gradient))
    by_name = zip(parameters.items(), computed[len(recorded) :], strict=True)
    # Copied, as both summands of p + q get one gradient; and laid out as parameters are, which fused optimizers expect.
    gradients = {
        name: gradient.clone() if gradient.is_sparse else torch.empty_like(parameter).copy_(gradient)
        for (name, parameter), gradient in by_name
        if gradient is not None
    }
    return Pass(loss.detach(), gradients, calls, recorder.refused, recorder.changed)


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(f"loss_fn returned {describe(loss)}; it must return one number, as reduction='mean' does.")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("nothing can be differentiated in torch.inference_mode; call this outside of it.")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any trainable parameter; detach nothing on the way to it.")
    return loss


def _refuse_reentrant_checkpoints(loss: Tensor) -> None:
    """Raise a ValueError where layers ran without gradients, to run again in a backward pass."""
    waiting, met = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in met:
            met.add(node)
            if node.name() == "CheckpointFunctionBackward":
                raise ValueError(
                    "a reentrant checkpoint hides the calls of its layers; write checkpoint(…, use_reentrant=False)."
                )
            waiting += [following for following, _ in node.next_functions]


class _Recorder:
    """Hooks that keep the inputs of layers as they were, and their outputs, call by call; see `differentiate`."""

    def __init__(self, layers: dict[str, nn.Module], freeze: bool) -> None:
        self.layers, self.freeze = layers, freeze
        self.calls: list[tuple[str, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]] = []
        self.refused: dict[str, str] = {}
        self.changed: set[str] = set()
        #: Of the calls that have not returned: the inputs, copies of them, and the states of generators and buffers.
        self._open_calls: dict[str, tuple[tuple[Any, ...], tuple[Tensor, ...], list[Tensor]]] = {}
        self._read: dict[str, tuple[Tensor, ...]] = {}
        #: What layers themselves have returned.
        self._returned: dict[str, Any] = {}
        self._trained = {path: [p for p in layer.parameters() if p.requires_grad] for path, layer in layers.items()}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as cleanup:
            for path, layer in self.layers.items():
                cleanup.callback(self._set_trainable, path, True)
                enter = partial(self._enter, path)  # before hooks that compute a weight, which are to find it frozen
                cleanup.callback(layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
                cleanup.callback(layer.register_forward_pre_hook(partial(self._note_read, path)).remove)
                cleanup.callback(layer.register_forward_hook(partial(self._return, path), prepend=True).remove)
                cleanup.callback(layer.register_forward_hook(partial(self._leave, path)).remove)
            yield

    def _set_trainable(self, path: str, mode: bool) -> None:
        for parameter in self._trained[path] if self.freeze else ():
            parameter.requires_grad_(mode)

    def _enter(self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args or kwargs or not all(isinstance(arg, Tensor) for arg in args):
            self.refused[path] = "it was not called with tensors alone, by position"
        self._set_trainable(path, False)
        self._open_calls[path] = args, _copies(args), _states(layer)

    def _note_read(self, path: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        given, copies, _ = self._open_calls[path]
        is_same = len(args) == len(given) and all(map(operator.is_, args, given))
        self._read[path] = copies if is_same else _copies(args)

    def _return(self, path: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._returned[path] = output

    def _leave(self, path: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._returned.pop(path) is not output:
            self.changed.add(path)
        if isinstance(output, Tensor) and not output.requires_grad:
            output = output.detach()  # a view of a parameter would require gradients with it again, and lead nowhere
        self._set_trainable(path, True)
        _, inputs, states = self._open_calls.pop(path)
        read = self._read.pop(path)
        if not all(map(torch.equal, states, _states(layer))):
            self.refused[path] = (
                "it drew random numbers or changed its buffers, which it would do again for every row without "
                "model.eval()"
            )
        if not isinstance(output, Tensor):
            self.refused[path] = f"it returned {type(output).__name__}; only a layer that returns one tensor has rows"
        elif path not in self.refused and (self.freeze or output.requires_grad):
            output = output if output.requires_grad else output.detach().requires_grad_()
            self.calls.append((path, inputs, read, output))
            return output.clone()  # so that an in-place activation behind the layer leaves the recorded output alone
        return output


def _states(layer: nn.Module) -> list[Tensor]:
    return [state for *_, state in generator_states(layer)] + [buffer.clone() for buffer in layer.buffers()]


def _copies(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    # Code behind the layer may work in place.
    return tuple(arg.detach().clone() for arg in args if isinstance(arg, Tensor))
