"""Jacobians of a layer, the rows that a correction sees in them, and corrected gradients of a whole model."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from .._checks import check_count, warn, without_none
from .._device import at_least_float32, without_autocast
from ..corrections import Correction, Solve, check_correction
from ..rows.models import label, refuse_attached
from .modules import DETACH_FIRST, Parameters, WrittenOut, as_rows, batched, choose_layers, pure, why_mixed
from .recording import Batch, Call, differentiate


def layer_jacobians(layer: nn.Module, *inputs: Tensor, chunk_size: int | None = None) -> dict[str, Tensor]:
    r"""Return per-sample Jacobians :math:`J_k = \partial z_k / \partial\theta` of a layer, by vmap of jacrev.

    Args:
        layer: any module that treats the samples of its inputs separately.
        inputs: the arguments of the layer; the first dimension of each tensor counts samples.
        chunk_size: how many samples are differentiated at once; None is all of them.

    Returns:
        For each trainable parameter a tensor of shape (samples, *output shape of a sample, *parameter shape).

    Raises:
        ValueError: the layer has no trainable parameter, is a batch norm that mixes samples, or has a correction
            attached (its backward is not its derivative). Submodules are not checked.
        TypeError: the layer does not return one tensor.

    Example:
        >>> import torch
        >>> from adiv_optim.jacobian import layer_jacobians
        >>> jacobians = layer_jacobians(torch.nn.Linear(3, 2), torch.ones(5, 3))
        >>> {name: tuple(jacobian.shape) for name, jacobian in jacobians.items()}
        {'weight': (5, 2, 2, 3), 'bias': (5, 2, 2)}
    """
    refuse_attached("layer_jacobians", layer, DETACH_FIRST)
    if why := why_mixed(*layer.modules()):
        raise ValueError(f"{why}; none has a Jacobian of its own.")
    trained, run = pure(layer)
    if any(parameter.is_complex() for parameter in trained.values()):
        raise ValueError(f"{type(layer).__name__} is complex, and has no real Jacobian.")
    if not trained:
        raise ValueError(f"{type(layer).__name__} has no trainable parameter to take a Jacobian with respect to.")

    def output(trained: Parameters, *sample: Tensor) -> Tensor:
        result = run(trained, *(tensor.unsqueeze(0) for tensor in sample))
        if not isinstance(result, Tensor):
            raise TypeError(f"{type(layer).__name__} returned {type(result).__name__}; it must return one tensor.")
        return result.squeeze(0)

    per_sample = vmap(jacrev(output), in_dims=(None, *[0] * len(inputs)), chunk_size=chunk_size)
    with WrittenOut():
        return per_sample(trained, *(tensor.detach() for tensor in inputs))


def corrected_gradients(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    correction: Correction | None,
    *,
    layers: Iterable[str] | None = None,
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    r"""Return gradients of a whole model with a correction on its layers, from explicit Jacobians.

    For every call of every corrected layer, with g_k the gradient of the loss at output row k,

    .. math:: \mathrm{grad}_p = \sum_k s_{p,k}\, J_{p,k}^\top g_k, \qquad
              f_{p,k} = \mathrm{tr}(J_{p,k} J_{p,k}^\top) / m,

    where m is the number of output features and s comes from `correction.scales(f)`. Output rows are the leading
    dimensions of a layer's output and its features the last one; for convolutions rows are positions and features the
    channels of a group. For nn.Linear f is |x|² and 1, so that `Proportional()` is 1/(|x|²+1) (Bird 2025, Eq. 20). g_k
    is backpropagated plainly.

    Args:
        model: the model, without attached corrections; it is run once, in the mode it is in, and updates its buffers.
        loss_fn: called with the model's output and the targets; returns a scalar.
        inputs: a tensor, a tuple of arguments, or a dict of keyword arguments, for the model.
        targets: handed to `loss_fn`.
        correction: the rule; None gives plain gradients, still through Jacobians.
        layers: paths of the modules to correct, whose arguments have samples as their first dimension. By default every
            module without submodules that has a trainable parameter, but for `PLAIN_BY_DEFAULT`. Jacobians of a
            parametrized layer are by its own parameters; `attach` corrects the gradient of the effective weight.
        chunk_size: samples whose Jacobians are in memory at once, each outputs × parameters of the largest layer. None
            is the whole batch, which `BatchIdeal` needs always.

    Returns:
        Parameter path → gradient, for every trainable parameter that the loss depends on.

    Raises:
        TypeError: the correction is no `Correction`, or `layers` is a string.
        ValueError: a correction is attached to the model, it has no trainable parameter, the loss is no scalar,
            `layers` names one that is not there or inside another, or a layer mixes samples, draws random numbers, or
            is called with keyword arguments.

    Example:
        >>> import torch
        >>> from adiv_optim import Proportional, jacobian
        >>> model = torch.nn.Bilinear(1, 1, 1, bias=False)  # z = w·x·y, so J = x·y
        >>> x, y = torch.tensor([[2.0]]), torch.tensor([[3.0]])
        >>> loss = lambda output, target: (output - target).sum()
        >>> jacobian.corrected_gradients(model, loss, (x, y), torch.zeros(1), Proportional())["weight"].item()
        0.1666666716337204
    """
    if correction is not None:
        check_correction(correction)
    check_count("corrected_gradients", **without_none(chunk_size=chunk_size))
    refuse_attached("corrected_gradients", model, DETACH_FIRST)
    names = {id(parameter): path for path, parameter in model.named_parameters() if parameter.requires_grad}
    chosen, _ = choose_layers(model, layers)
    _check_layers(chosen)
    recorded = differentiate(model, Batch(loss_fn, inputs, targets), chosen, freeze_layers=True)
    gradients = recorded.gradients
    for path, layer in chosen.items():
        unseen = [name for p in layer.parameters() if (name := names.get(id(p))) in gradients]
        if unseen and path not in recorded.calls:
            unseen_by = f"corrected_gradients: {unseen[0]} has a gradient, and no call of {label(path)} was seen"
            if layers is not None:
                raise ValueError(f"{unseen_by}, whose parameters others use; name those.")
            warn(f"{unseen_by}: it stays plain; see `layers`.")
    for path, calls in recorded.calls.items():
        layer = chosen[path]
        for call in calls:
            with without_autocast(call.grad_output.device.type):
                by_parameter = _call_gradients(path, layer, call, correction, chunk_size)
            for local_name, gradient in by_parameter.items():
                name = names[id(layer.get_parameter(local_name))]
                gradients[name] = gradient + gradients[name] if name in gradients else gradient  # a sparse one last
    return gradients


def backward(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    correction: Correction | None,
    *,
    layers: Iterable[str] | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Add `corrected_gradients` to `p.grad`, so that any optimizer can step on them; hooks of parameters do not run.

    Arguments and errors are those of `corrected_gradients`.

    Returns:
        The loss, detached.

    Example:
        >>> import torch
        >>> from adiv_optim import Proportional, jacobian
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> mse = torch.nn.functional.mse_loss
        >>> loss = jacobian.backward(model, mse, torch.ones(4, 2), torch.zeros(4, 1), Proportional())
        >>> opt.step()
    """
    losses: list[Tensor] = []

    def recorded_loss(output: Any, targets: Any) -> Tensor:
        losses.append(loss_fn(output, targets))
        return losses[0]

    gradients = corrected_gradients(
        model, recorded_loss, inputs, targets, correction, layers=layers, chunk_size=chunk_size
    )
    for name, gradient in gradients.items():
        parameter = model.get_parameter(name)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return losses[0].detach()


def _check_layers(chosen: Mapping[str, nn.Module]) -> None:
    for path, layer in chosen.items():
        if why := why_mixed(*layer.modules()):
            raise ValueError(f"{label(path)}: {why}; none has a Jacobian of its own: leave it out of `layers`.")
        if any(parameter.is_complex() for parameter in layer.parameters()):
            raise ValueError(f"{label(path)} is complex, and has no real Jacobian; leave it out of `layers`.")
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            raise ValueError(f"{label(path)} has no trainable parameter; leave it out of `layers`.")
        below = {id(module) for module in layer.modules() if module is not layer}
        for other, module in chosen.items():
            if id(module) in below:
                raise ValueError(f"layers names {other!r}, which is inside {path!r}, and counts twice; name one.")


def _call_gradients(
    path: str, layer: nn.Module, call: Call, correction: Correction | None, chunk_size: int | None
) -> dict[str, Tensor]:
    """Return Σ_k s_k J_kᵀ g_k over the rows of a call."""
    inputs, grad_output = batched(layer, call.inputs, call.grad_output)
    samples = len(grad_output)
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    totals = {name: torch.zeros_like(at_least_float32(p.detach())) for name, p in trained.items()}
    # A correction that needs all rows at once needs all Jacobians at once.
    chunk = chunk_size if chunk_size and (correction is None or correction.additive) else max(samples, 1)
    for start in range(0, samples, chunk):
        part = slice(start, start + chunk)
        jacobians = layer_jacobians(layer, *(tensor[part] for tensor in inputs), chunk_size=chunk_size)
        rows = _JacobianRows(
            {name: as_rows(layer, at_least_float32(j), trained[name].shape) for name, j in jacobians.items()},
            as_rows(layer, at_least_float32(grad_output[part].detach())),
            f"{label(path)} ({type(layer).__name__})",
        )
        unscaled = dict.fromkeys(jacobians, rows.grad_rows.new_ones(()))
        gradients = correction.gradients(rows) if correction else rows.contract(unscaled)
        for name, gradient in gradients.items():
            totals[name] += gradient.view_as(totals[name])
    return {name: total.to(trained[name].dtype) for name, total in totals.items()}


@dataclass(frozen=True)
class _JacobianRows:
    """The rows of a layer without a closed form, as a `Correction` reads them."""

    jacobians: dict[str, Tensor]  # (groups, rows, features, parameter size)
    grad_rows: Tensor  # (groups, rows, features)
    label: str

    @property
    def count(self) -> int:
        return self.grad_rows.shape[1]

    def factors(self) -> dict[str, Tensor]:
        return {name: jacobian.square().sum(-1).mean(-1) for name, jacobian in self.jacobians.items()}

    def contract(self, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: torch.einsum("grm,grmp->p", scales[name].unsqueeze(-1) * self.grad_rows, jacobian)
            for name, jacobian in self.jacobians.items()
        }

    def ideal(self, solve: Solve) -> dict[str, Tensor]:
        kernel = reduce(torch.add, (j.flatten(1, 2) @ j.flatten(1, 2).mT for j in self.jacobians.values()))
        # Every output feature is a row of the Jacobian, so there are rows × features of them.
        mixed = solve(kernel, self.grad_rows.flatten(1).unsqueeze(-1), kernel.shape[-1]).view_as(self.grad_rows)
        return {name: torch.einsum("grm,grmp->p", mixed, jacobian) for name, jacobian in self.jacobians.items()}
