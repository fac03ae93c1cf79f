"""The recorder of a forward pass: the inputs of a model's layers, and the gradients of their outputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .modules import generator_states


class Call(NamedTuple):
    """The inputs of a layer's call, as they were then, and dL/dz of its output."""

    inputs: tuple[Tensor, ...]
    grad_output: Tensor


class Pass(NamedTuple):
    """One forward and backward."""

    loss: Tensor  # detached
    gradients: dict[str, Tensor]  # parameter path → gradient, where the loss depends on it; none shares memory
    calls: dict[str, list[Call]]  # layer path → its calls on which the loss depends
    refused: dict[str, str]  # layer path → why a call of it has no rows


def _random_states(layer: nn.Module) -> list[Tensor]:
    return [state for *_, state in generator_states(layer)]


def _copied(value: Any) -> Any:
    # A model may work on its input in place, which must not change the caller's data.
    return value.clone() if isinstance(value, Tensor) else value


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise ValueError(f"loss_fn returned {kind}; it must return one number, as reduction='mean' does.")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("nothing can be differentiated in torch.inference_mode; call this outside of it.")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any trainable parameter; detach nothing on the way to it.")
    return loss


class _Recording:
    """Hooks that keep the inputs of layers as they were, and their outputs, call by call; see `differentiate`."""

    def __init__(self, layers: dict[str, nn.Module], constant: bool) -> None:
        self.layers, self.constant = layers, constant
        self.calls: list[tuple[str, tuple[Tensor, ...], Tensor]] = []
        self.refused: dict[str, str] = {}
        # Of calls that have not returned: the inputs, or None where they have no rows, and the random generators.
        self._within: dict[str, list[tuple[tuple[Tensor, ...] | None, list[Tensor]]]] = {path: [] for path in layers}
        self._trained = {path: [p for p in each.parameters() if p.requires_grad] for path, each in layers.items()}

    @contextmanager
    def within_hooks(self) -> Iterator[None]:
        with ExitStack() as ends:
            for path, layer in self.layers.items():
                ends.callback(self._train, path, True)
                ends.callback(layer.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True).remove)
                ends.callback(layer.register_forward_hook(partial(self._leave, path)).remove)
            yield

    def _train(self, path: str, mode: bool) -> None:
        for parameter in self._trained[path] if self.constant else ():
            parameter.requires_grad_(mode)

    def _enter(self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = bool(args) and not kwargs and all(isinstance(arg, Tensor) for arg in args)
        if not tensors:
            arguments = "with arguments other than tensors by position" if args or kwargs else "without arguments"
            self.refused[path] = f"it was called {arguments}"
        # A copy: code behind the layer may work in place.
        inputs = tuple(arg.detach().clone() for arg in args) if tensors else None
        self._train(path, False)
        self._within[path].append((inputs, _random_states(layer)))

    def _leave(self, path: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor) and not output.requires_grad:
            output = output.detach()  # a view of a parameter would require gradients with it again, and lead nowhere
        self._train(path, True)
        inputs, states = self._within[path].pop()
        if not all(map(torch.equal, states, _random_states(layer))):
            self.refused[path] = "it drew random numbers, which it would draw anew for every row without model.eval()"
        if not isinstance(output, Tensor):
            self.refused[path] = f"it returned {type(output).__name__}; only a layer that returns one tensor has rows"
        elif inputs is not None and (self.constant or output.requires_grad):
            output = output if output.requires_grad else output.detach().requires_grad_()
            self.calls.append((path, inputs, output))
            return output.clone()  # so that an in-place activation behind the layer leaves the recorded output alone
        return output


def differentiate(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    layers: dict[str, nn.Module],
    *,
    constant: bool = False,
) -> Pass:
    """Run a model forward and backward once, and keep the inputs of layers and the gradients of their outputs.

    With `constant` the parameters of these layers are constants while the layers run: of a parameter that another
    module shares, autograd has that module's part of the gradient alone. And a call without rows is an error.
    """
    recording = _Recording(layers, constant)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named = inputs if isinstance(inputs, Mapping) else {}
    arguments = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
    with torch.enable_grad(), recording.within_hooks():
        output = model(*map(_copied, arguments), **{name: _copied(each) for name, each in named.items()})
        for path, reason in recording.refused.items() if constant else ():
            label = f"layer {path!r} ({type(layers[path]).__name__})"
            raise ValueError(f"{label} has no Jacobian: {reason}; leave it out of `layers`.")
        loss = _checked(loss_fn(output, targets))
        recorded = list(recording.calls)
        outputs = [output for *_, output in recorded]
        # Within the hooks: a checkpoint must recompute the same graph.
        computed = torch.autograd.grad(loss, [*outputs, *parameters.values()], allow_unused=True)
    calls: dict[str, list[Call]] = {}
    for (path, read, _), gradient in zip(recorded, computed, strict=False):
        if gradient is not None and path not in recording.refused:
            calls.setdefault(path, []).append(Call(read, gradient))
    # Copies: autograd gives both summands of p + q the same gradient, and those of a sum a view of a single number.
    of_parameters = zip(parameters, computed[len(recorded) :], strict=True)
    gradients = {name: gradient.clone() for name, gradient in of_parameters if gradient is not None}
    return Pass(loss.detach(), gradients, calls, recording.refused)
