"""Copies of a model and its optimizer, and the step that `divergence` takes on them."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .._device import widest_dtype, without_autocast
from ..attach import detach
from ..jacobian import GaussNewton
from ..jacobian.modules import same_randomness
from ..jacobian.recording import Batch, Pass, differentiate
from ..optim import OptimizerWrapper
from ..optim.parameters import check_same_parameters
from ..rows.layers import Corrected


def twins(model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
    """Copy a model and the optimizer that steps on it; the copies are tied to each other as the originals are."""
    memo: dict[int, Any] = {}
    try:
        model_copy: nn.Module = copy.deepcopy(model, memo)
        twin: Optimizer | None = copy.deepcopy(optimizer, memo)
        if optimizer is not None and twin is not None:
            _copy_attributes(optimizer, twin, memo)
            twin.zero_grad()  # else remembered rows of unfinished micro-batches would count
    except (RuntimeError, TypeError) as error:  # the latter of locks, files and generators
        names = type(model).__name__ + f" or its {type(optimizer).__name__}" * (optimizer is not None)
        raise ValueError(
            f"{names} cannot be copied ({error}), and divergence measures on a copy; they must not hold locks, files, "
            "generators, or tensors computed from parameters (torch.nn.utils.weight_norm does, its parametrization "
            "does not)."
        ) from error
    return model_copy, twin


def _copy_attributes(optimizer: Optimizer, twin: Optimizer, memo: dict[int, Any]) -> None:
    # torch copies an optimizer without the attributes a subclass adds, which its step may read. A `step` set on the
    # instance is a scheduler's, and steps the original.
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and name != "step":
            setattr(twin, name, copy.deepcopy(value, memo))
    if isinstance(optimizer, OptimizerWrapper) and isinstance(twin, OptimizerWrapper):
        _copy_attributes(optimizer.inner, twin.inner, memo)


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Refuse an optimizer that takes no step on this model by itself."""
    is_of_trainer = isinstance(getattr(optimizer, "optimizer", None), Optimizer)  # its step may skip the real one
    if is_of_trainer or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}; pass the torch.optim.Optimizer that trains the model "
            "(optimizer.optimizer of Lightning's and Accelerate's, and of Lookahead for the step within), or None for "
            "the gradient step."
        )
    if isinstance(optimizer, (LBFGS, GaussNewton)):
        name = type(optimizer).__name__
        raise TypeError(f"{name} evaluates the loss many times within a step; pass None.")
    check_same_parameters("divergence", optimizer, model)


class Step(NamedTuple):
    """A step on the copies, and the forward and backward pass that gave its gradients."""

    recorded: Pass
    plain: dict[str, Tensor]  # parameter path → gradient of the loss itself, without corrections
    change: dict[str, Tensor]  # parameter path → Δθ
    rates: dict[str, float]  # path of a parameter that the optimizer holds → its learning rate


def take_step(model: nn.Module, optimizer: Optimizer | None, batch: Batch, layers: dict[str, nn.Module]) -> Step:
    """Take the optimizer's step, or minus the gradient, on copies, and record the calls of layers."""
    is_corrected = any(isinstance(module, Corrected) for module in model.modules())
    uncorrected = detach(copy.deepcopy(model)) if is_corrected else None  # before the pass changes buffers
    with same_randomness(model):
        recorded = differentiate(model, batch, layers)
    # Both passes draw the same random numbers, so that both gradients are those of the same loss.
    plain = recorded if uncorrected is None else differentiate(uncorrected, batch, {})
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        gradient = recorded.gradients.get(name)
        parameter.grad = None if gradient is None else gradient.clone()  # some optimizers work in it
    if optimizer is not None:
        return Step(recorded, plain.gradients, *_optimizer_step(optimizer, parameters))
    change = {name: torch.zeros_like(p) if p.grad is None else -p.grad for name, p in parameters.items()}
    return Step(recorded, plain.gradients, change, dict.fromkeys(parameters, 1.0))


def _optimizer_step(
    optimizer: Optimizer, parameters: dict[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return Δθ of an optimizer's step and the learning rates, and put the parameters back."""
    before = {
        name: p.detach().to(torch.promote_types(p.dtype, widest_dtype(p.device)), copy=True)
        for name, p in parameters.items()
    }
    by_id = {id(p): float(group.get("lr", 1.0)) for group in optimizer.param_groups for p in group["params"]}
    rates = {name: by_id[id(p)] for name, p in parameters.items() if id(p) in by_id}
    with without_autocast(next(iter(parameters.values())).device.type):
        optimizer.step()
    change = {name: p.detach().to(before[name].dtype) - before[name] for name, p in parameters.items()}
    for name, parameter in parameters.items():  # rows are measured where the step begins
        parameter.detach().copy_(before[name])
    return change, rates
