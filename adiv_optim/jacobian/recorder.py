"""The recorder of a forward pass: the inputs of a model's layers, and the gradients of their outputs."""

from collections.abc import Callable, Mapping
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
    gradients: dict[str, Tensor]  # parameter path → gradient in memory of its own, where the loss depends on it
    calls: dict[str, list[Call]]  # layer path → its calls, where the loss depends on them
    refused: dict[str, str]  # layer path → why a call of it has no rows


def _random_states(layer: nn.Module) -> list[Tensor]:
    return [state for *_, state in generator_states(layer)]


def _copied(value: Any) -> Any:
    # A model may work on its input in place, and the caller's data is not ours.
    return value.clone() if isinstance(value, Tensor) else value


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise ValueError(f"loss_fn returned {found}; it must return one number, as reduction='mean' does.")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("nothing can be differentiated in torch.inference_mode; call this outside of it.")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any trainable parameter; detach nothing on the way to it.")
    return loss


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

    With `constant` the layers' own parameters are constants while the layers run. If a module that is not recorded
    shares such a parameter, autograd then finds that module's part of the gradient alone. And a call without rows is an
    error.
    """
    read: dict[str, list[tuple[Tensor, ...] | None]] = {path: [] for path in layers}
    trained = {path: [p for p in layer.parameters() if p.requires_grad and constant] for path, layer in layers.items()}
    recorded: list[tuple[str, tuple[Tensor, ...], Tensor]] = []
    drawn: dict[str, list[list[Tensor]]] = {path: [] for path in layers}
    refused: dict[str, str] = {}

    def refuse(path: str, found: str, remedy: str) -> None:
        if constant:
            kind = type(layers[path]).__name__
            raise ValueError(f"layer {path!r} ({kind}) {found}{remedy} leave it out of `layers`.")
        refused[path] = f"it {found}"

    def enter(path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = bool(args) and not kwargs and all(isinstance(arg, Tensor) for arg in args)
        if not tensors:
            remedy = ", which have no per-sample Jacobian; pass tensors by position or"
            found = (
                "was called with keyword or non-tensor arguments" if args or kwargs else "was called without arguments"
            )
            refuse(path, found, remedy)
        # A copy: code behind the layer may work in place.
        read[path].append(tuple(arg.detach().clone() for arg in args) if tensors else None)
        for parameter in trained[path]:
            parameter.requires_grad_(False)
        drawn[path].append(_random_states(layer))

    def leave(path: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor) and not output.requires_grad:
            output = output.detach()  # a view of a parameter would require gradients with it again, and lead nowhere
        for parameter in trained[path]:
            parameter.requires_grad_(True)
        inputs = read[path].pop()
        if not all(map(torch.equal, drawn[path].pop(), _random_states(layer))):
            refuse(
                path, "drew random numbers, which it would draw anew for every row", ": call model.eval() before, or"
            )
        if not isinstance(output, Tensor):
            found = f"returned {type(output).__name__}; only a layer that returns one tensor has rows"
            refuse(path, found, " to correct:")
        elif inputs is not None and (constant or output.requires_grad):
            output = output if output.requires_grad else output.detach().requires_grad_()
            recorded.append((path, inputs, output))
            return output.clone()  # so that an in-place activation behind the layer leaves the recorded output alone
        return output

    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named = inputs if isinstance(inputs, Mapping) else {}
    arguments = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
    handles: list[Any] = []
    for path, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(partial(enter, path), with_kwargs=True))
        handles.append(layer.register_forward_hook(partial(leave, path)))
    with torch.enable_grad():
        try:
            output = model(*map(_copied, arguments), **{name: _copied(each) for name, each in named.items()})
            loss = _checked(loss_fn(output, targets))
            calls_made = list(recorded)
            wanted = [*(output for *_, output in calls_made), *parameters.values()]
            # With the hooks still there: what a checkpoint recomputes must be what it has seen.
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
            for parameter in (parameter for kept in trained.values() for parameter in kept):
                parameter.requires_grad_(True)
    calls: dict[str, list[Call]] = {}
    for (path, read_then, _), gradient in zip(calls_made, found, strict=False):
        if gradient is not None and path not in refused:
            calls.setdefault(path, []).append(Call(read_then, gradient))
    gradients = dict(zip(parameters, found[len(calls_made) :], strict=True))
    # Copies: autograd gives both summands of p + q one gradient, and those of a sum a view of a single number.
    own = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
    return Pass(loss.detach(), own, calls, refused)
