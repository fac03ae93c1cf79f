"""The divergence of a step: how it moves every layer's outputs, against the movement that they ask for."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from .._checks import check_count
from .._device import widest, without_autocast
from ..attach import attach
from ..corrections import Correction, check_correction
from ..jacobian.modules import choose_layers, same_randomness, why_mixed
from ..jacobian.recording import Batch
from ..optim import OptimizerWrapper
from ..rows.layers import Corrected, plain_type
from ..rows.models import label, refuse_attached
from ._copies import Step, check_optimizer, take_step, twins
from ._result import Divergence, LayerDivergence, joined, summarise
from ._rows import closed_rows, general_rows, has_closed_form


def divergence(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    correction: Correction | None = None,
    *,
    optimizer: Optimizer | None = None,
    layers: Iterable[str] | None = None,
    max_rows: int = 1024,
) -> Divergence:
    r"""Measure how a step on one batch moves the outputs of every layer, with the layer's input fixed.

    Row k of a layer (a sample, a token, a convolution's patch) has the output z_k and asks, by
    :math:`g_k = \partial L / \partial z_k`, to move along −g_k. With :math:`J_k = \partial z_k / \partial\theta` a step
    Δθ moves it, to first order, by the *effective update*

    .. math:: \Delta z_k / \eta = J_k \Delta\theta / \eta = o_k + (\text{interference of the other rows}),
              \qquad \gamma_k = -\langle o_k, g_k \rangle / |g_k|^2 ,

    with the learning rate η and o_k due to row k's own part of the gradient, :math:`-J_k J_k^\top g_k` without a
    correction. For z = Wx + b the *own gain* γ is |x_k|² + 1, the affine divergence (Bird 2025, arXiv 2512.22247,
    Eq. 11; interference: Eqs. 46 to 49). `Proportional`, `Disproportional` and `AffineLikeLinear` make γ = 1;
    `BatchIdeal(per_sample=False)` makes it the diagonal of :math:`K(K + \lambda I)^{-1}`, and as λ → 0 removes the
    interference of independent rows. First order is exact for every layer that is linear in its parameters.

    `LayerDivergence` has these numbers for every row. Per layer and in total, ⟨−Δθ, ∇L⟩/η says whether the step is
    downhill to first order, which a correction need not be.

    With an optimizer Δθ is its real step, momentum, decay and rounding included, and cosine, projection and descent are
    that step's. Such a step cannot be split by rows: γ and its shares are those of the layer's whole gradient,
    and interference is the share of Δz_k normal to g_k. A layer's η is the largest rate of its parameter
    groups; a layer with η = 0 is left out, a named one too.

    Model and optimizer are copied, and run on the copies: parameters, gradients, buffers, optimizer state, torch's
    random generators and training mode stay as they are, bit for bit. Forward hooks of the model run, hooks of the
    optimizer do not. The cost is that of the copies, of one training step (its pass taken twice if a correction is
    attached) and of the rows measured.

    Args:
        model: in the mode it is to be measured in.
        loss_fn: called with the model's output and the targets; returns a scalar.
        inputs: the model's: a tensor, a tuple of arguments, or a dict of keyword arguments.
        targets: handed to `loss_fn`.
        correction: measure as if it were attached (see `attach`). None measures the model as it is, corrections
            that are attached included.
        optimizer: the one whose step is measured, in its present state; None measures the gradient step. A group
            without 'lr' has rate 1.
        layers: paths of the modules to measure. By default every module without submodules that owns a trainable
            parameter, but for norms, embeddings and the like (`jacobian.PLAIN_BY_DEFAULT`). A layer without a
            closed form must treat the samples of its inputs, their first dimension, separately, and is measured by
            differentiating once more for every row.
        max_rows: rows measured per call of a layer, evenly spaced, the same ones every time; a grouped convolution
            that is not parametrized has max_rows / groups in each group, at least one. The step itself is that of all
            rows.

    Returns:
        A `Divergence`, whose numbers per row are float64 tensors of shape (measured rows,); print it.

    Raises:
        TypeError: `correction` is no `Correction`, `layers` is a string, or `optimizer` has no step to measure: it is
            no optimizer, LBFGS, GaussNewton, or a trainer's around another.
        ValueError: a correction is given and one attached, the optimizer is another model's, `layers` are not there or
            have no rows, max_rows is below 1, the model has no trainable parameter or cannot be copied, or the loss is
            no scalar or depends on no parameter.
        RuntimeError: within torch.inference_mode.

    Example:
        >>> import torch
        >>> from adiv_optim import Proportional
        >>> from adiv_optim.diagnostics import divergence
        >>> model, x = torch.nn.Linear(2, 1), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> mse = torch.nn.functional.mse_loss
        >>> divergence(model, mse, x, torch.ones(2, 1)).layers[""].gain  # |x|² + 1
        tensor([26.,  2.], dtype=torch.float64)
        >>> summary = divergence(model, mse, x, torch.ones(2, 1), Proportional()).layers[""].summary()
        >>> round(summary["gain_mean"], 6), round(summary["responsibility"]["weight"], 3)
        (1.0, 0.731)
        >>> step = divergence(model, mse, x, torch.ones(2, 1), optimizer=torch.optim.Adam(model.parameters(), lr=0.1))
        >>> step.descent > 0  # it lowers the loss, to first order
        True
    """
    check_count("divergence", max_rows=max_rows)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no trainable parameter, so there is no step to measure.")
    if isinstance(correction, Optimizer):
        raise TypeError("divergence: correction is an optimizer; pass that by name: optimizer=….")
    if correction is not None:
        check_correction(correction)
        remedy = "leave `correction` out to measure that, or call adiv_optim.detach(model) first"
        refuse_attached("divergence", model, remedy)
    if optimizer is not None:
        check_optimizer(optimizer, model)

    with torch.enable_grad(), same_randomness(model):
        twin, twin_optimizer = twins(model, optimizer)
        if correction is not None:
            attach(twin, correction)
        chosen, left_out = choose_layers(twin, layers)
        left_out |= {path: why for path, layer in chosen.items() if (why := _why_unmeasured(layer))}
        watched = {path: layer for path, layer in chosen.items() if path not in left_out}
        step = take_step(twin, twin_optimizer, Batch(partial(_loss_of_copy, model, loss_fn), inputs, targets), watched)

    measured = {}
    names = {id(p): name for name, p in twin.named_parameters()}
    with torch.no_grad(), same_randomness(model), without_autocast(next(model.parameters()).device.type):
        for path, layer in watched.items():
            trained = {local: names[id(p)] for local, p in layer.named_parameters() if p.requires_grad}
            outcome = _measure(path, layer, trained, step, max_rows, optimizer is not None)
            if isinstance(outcome, LayerDivergence):
                measured[path] = outcome
            else:
                left_out[path] = outcome
        # Over one rate for all, so that the sign is that of the whole step.
        rise = sum(_inner_product(step.change[name], step.plain.get(name)) for name in step.rates)
        rate = max(step.rates.values(), default=0.0)

    for path, why in left_out.items() if layers is not None else ():
        if why != _ZERO_RATE:
            raise ValueError(f"{label(path)} ({type(chosen[path]).__name__}) cannot be measured: {why}.")
    return Divergence(
        layers=measured,
        left_out=left_out,
        loss=step.recorded.loss.item(),
        descent=-rise / rate if rate else math.nan,
        optimizer=None if optimizer is None else _class_names(optimizer),
    )


def _loss_of_copy(model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], output: Any, targets: Any) -> Tensor:
    """Return the loss, which is to depend on the copy of the model alone."""
    loss = loss_fn(output, targets)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1 and parameters:
        found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
        if any(gradient is not None for gradient in found):
            raise ValueError(
                "divergence runs a copy of the model, and the loss reads the model's own parameters: by loss_fn, as "
                "a penalty, which belongs in the forward; or by a forward set on the model that calls its own one."
            )
    return loss


def _class_names(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    return f"{name}({_class_names(optimizer.inner)})" if isinstance(optimizer, OptimizerWrapper) else name


#: No error even for a layer that is named: the first step of a warm-up has this rate, and the next has another.
_ZERO_RATE = "its learning rate is 0"


def _measure(
    path: str, layer: nn.Module, names: dict[str, str], step: Step, max_rows: int, by_optimizer: bool
) -> LayerDivergence | str:
    """Measure the rows of a layer's calls, or return why not; `names` has the paths of its trained parameters."""
    if path in step.recorded.refused:
        return step.recorded.refused[path]
    if path in step.recorded.changed and has_closed_form(layer):
        return "a forward hook changes its output; remove the hook, or make it a module behind the layer"
    calls = [call for call in step.recorded.calls.get(path, []) if call.grad_output.numel()]
    if not calls:
        return "it was not called with any rows, the loss does not depend on it, or a reentrant checkpoint hides calls"
    if any(each.is_complex() for call in calls for each in (*layer.parameters(), *call.inputs, call.grad_output)):
        return "it computes with complex numbers, whose rows are not measured"
    if has_closed_form(layer):  # what else it carries multiplies no rows
        names = {local: name for local, name in names.items() if local in ("weight", "bias")}
    rates = [step.rates[name] for name in names.values() if name in step.rates]
    if not rates:
        return "the optimizer holds none of its parameters"
    rate = max(rates)
    if not rate:
        return _ZERO_RATE
    change = {local: widest(step.change[name]) / rate for local, name in names.items()}
    measure_rows = closed_rows if has_closed_form(layer) else general_rows
    parts, total_rows = [], 0
    try:
        for call in calls:
            part, count = measure_rows(layer, call, change, max_rows)
            moved = part._replace(row_index=part.row_index + total_rows)
            parts.append(summarise(moved, list(change), by_optimizer))  # calls may differ in the width of their rows
            total_rows += count
    except (RuntimeError, IndexError, ValueError) as error:
        if has_closed_form(layer) or isinstance(error, torch.OutOfMemoryError):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"its rows cannot be differentiated one by one: {first}"
    return LayerDivergence(
        kind=plain_type(layer).__name__,
        correction=repr(layer._correction) if isinstance(layer, Corrected) else None,
        total_rows=total_rows,
        descent=-sum(_inner_product(change[local], step.plain.get(name)) for local, name in names.items()),
        **joined(parts),
    )


def _why_unmeasured(module: nn.Module) -> str | None:
    if any(isinstance(inside, Corrected) for inside in module.modules() if inside is not module):
        return "layers inside it have a correction: name those"
    if why := why_mixed(*module.modules()):
        return why
    if has_closed_form(module) and not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "a hook computes its weight before every call; use torch.nn.utils.parametrizations instead"
    if isinstance(module, Corrected) and parametrize.is_parametrized(module):
        return "it is parametrized and corrected, so a row's contribution goes through the parametrization"
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return "it has no trainable parameter"
    return None


def _inner_product(left: Tensor, right: Tensor | None) -> float:
    if right is None:
        return 0.0
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    return (widest(left) * widest(right)).sum().item()
