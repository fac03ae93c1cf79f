"""Everything that is measured happens on copies, made and run here."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ..optim import OptimizerWrapper

#: Inputs of a layer's call, and dL/dz of what it returned.
Call = tuple[tuple[Tensor, ...], Tensor]


class Pass(NamedTuple):
    """One forward and backward.

    Args:
        loss: the batch's.
        gradients: parameter path → gradient, where the loss depends on it.
        calls: layer path → its calls.
        refused: layer path → why a call of it has no rows.
    """

    loss: float
    gradients: dict[str, Tensor]
    calls: dict[str, list[Call]]
    refused: dict[str, str]


def twins(model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
    """Copies of a model and of the optimizer that steps on it, tied to each other as the originals are."""
    memo: dict[int, Any] = {}
    try:
        model_copy: nn.Module = copy.deepcopy(model, memo)
    except RuntimeError as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied ({error}), and divergence measures on a copy; a module must not "
            "hold tensors computed from its parameters (torch.nn.utils.weight_norm does, its parametrization does not)."
        ) from error
    return model_copy, None if optimizer is None else _copied(optimizer, memo)


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    twin: Optimizer = copy.deepcopy(optimizer, memo)
    _complete(optimizer, twin, memo)
    twin.zero_grad()  # or what it remembers would count rows of micro-batches that are under way
    return twin


def _complete(optimizer: Optimizer, twin: Optimizer, memo: dict[int, Any]) -> None:
    # torch copies an optimizer without the attributes a subclass adds, which its step may read. A `step` set on the
    # instance is a scheduler's wrapper around the original's own.
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and name != "step":
            setattr(twin, name, copy.deepcopy(value, memo))
    if isinstance(optimizer, OptimizerWrapper) and isinstance(twin, OptimizerWrapper):
        _complete(optimizer.inner, twin.inner, memo)


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Raise if there is no step of this optimizer on this model to measure."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer is {optimizer!r} of type {type(optimizer).__name__}; pass the torch.optim.Optimizer that "
            "trains the model, or None for the gradient step."
        )
    if isinstance(optimizer, LBFGS):
        raise TypeError("LBFGS evaluates the loss many times within a step, which has no one learning rate; pass None.")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise ValueError(
            f"none of the {len(held)} tensors the optimizer holds is a parameter of the model; build it from this "
            "model's parameters(), after any deepcopy that makes new ones."
        )
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} has a parameter group without 'lr', and updates are measured per unit of "
            "learning rate; give the group an 'lr' (1.0 measures the step as it is)."
        )


@contextmanager
def same_randomness(model: nn.Module) -> Iterator[None]:
    """Give the random generators back as they were found."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(device.index for device in devices)):
        yield


def differentiate(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    layers: dict[str, nn.Module],
) -> Pass:
    """Run a model forward and backward, and keep what its layers read and what came back to them."""
    recorded: list[tuple[str, tuple[Tensor, ...], Tensor]] = []
    refused: dict[str, str] = {}
    paths = {layer: path for path, layer in layers.items()}
    before: dict[nn.Module, list[tuple[Tensor, ...] | None]] = {layer: [] for layer in paths}

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = not kwargs and all(isinstance(arg, Tensor) for arg in args)
        # A copy: what comes behind the layer may work in place.
        before[layer].append(tuple(arg.detach().clone() for arg in args) if tensors else None)

    def leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        inputs = before[layer].pop()
        if inputs is None:
            refused[paths[layer]] = "it was called with keyword or non-tensor arguments"
        elif not isinstance(output, Tensor):
            refused[paths[layer]] = f"it returned {type(output).__name__}, which has no rows"
        elif output.requires_grad:
            recorded.append((paths[layer], inputs, output))
            return output.clone()
        return output

    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    handles = []
    try:
        for layer in paths:
            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(layer.register_forward_hook(leave))
        # Copies here as well: a model may work on its input in place, and the caller's data is not ours.
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        output = model(*(each.clone() if isinstance(each, Tensor) else each for each in arguments))
    finally:
        for handle in handles:
            handle.remove()
    loss = loss_fn(output, targets)
    found = torch.autograd.grad(loss, [*(z for *_, z in recorded), *parameters.values()], allow_unused=True)
    calls: dict[str, list[Call]] = {}
    for (path, inputs_, _), gradient in zip(recorded, found, strict=False):
        if gradient is not None and path not in refused:
            calls.setdefault(path, []).append((inputs_, gradient))
    gradients = dict(zip(parameters, found[len(recorded) :], strict=True))
    return Pass(loss.item(), {name: g for name, g in gradients.items() if g is not None}, calls, refused)


def step_of(
    model: nn.Module, optimizer: Optimizer | None, gradients: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Take the step; return Δθ of every trainable parameter, and the rates of those the optimizer holds.

    Without an optimizer it is the gradient step, −gradient at rate 1.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        parameter.grad = gradients.get(name)
    if optimizer is None:
        step = {n: torch.zeros_like(p) if p.grad is None else -p.grad for n, p in parameters.items()}
        return step, dict.fromkeys(parameters, 1.0)
    wide = torch.float32 if any(p.device.type == "mps" for p in parameters.values()) else torch.float64
    old = {name: p.detach().to(wide, copy=True) for name, p in parameters.items()}
    rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    optimizer.step()
    step = {name: p.detach().to(wide) - old[name] for name, p in parameters.items()}
    return step, {name: rates[id(p)] for name, p in parameters.items() if id(p) in rates}
