"""Corrected gradients of a whole model."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from .._linalg.host import without_autocast
from .._linalg.limits import check_count, given
from ..attach.checks import refuse_attached
from ..corrections import Correction, check_correction
from ..functional.shared import parameters_of
from .modules import choose_layers, mixes_samples
from .recorder import differentiate
from .rows import BY_ITSELF, layer_gradients


def _loss_and_gradients(
    name: str,
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    correction: Correction | None,
    *,
    layers: Iterable[str] | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    if correction is not None:
        check_correction(correction)
    check_count(name, **given(chunk_size=chunk_size))
    refuse_attached(name, model, BY_ITSELF)
    names = {id(parameter): path for path, parameter in model.named_parameters() if parameter.requires_grad}
    if not names:
        raise ValueError(f"{type(model).__name__} has no trainable parameter to give a gradient.")
    chosen, _ = choose_layers(model, layers)
    for path, layer in chosen.items():
        if why := mixes_samples(layer):
            raise ValueError(f"layer {path!r}: {why}; they have no Jacobian of their own: leave it out of `layers`.")
        inside = {id(module) for module in layer.modules() if module is not layer}
        if within := next((other for other, module in chosen.items() if id(module) in inside), None):
            raise ValueError(
                f"layers names {within!r}, which is inside {path!r}: its gradient would count twice; name one of them."
            )
    found = differentiate(model, loss_fn, inputs, targets, chosen, constant=True)
    gradients = found.gradients
    for path, call in ((path, call) for path, calls in found.calls.items() for call in calls):
        label = f"layer {path!r} ({type(chosen[path]).__name__})"
        with without_autocast(call.grad_output.device.type):
            own = layer_gradients(label, chosen[path], call, correction, chunk_size)
        for local, gradient in own.items():
            key = names[id(chosen[path].get_parameter(local))]
            gradients[key] = gradients[key] + gradient if key in gradients else gradient
    return found.loss, gradients


@parameters_of(_loss_and_gradients)
def corrected_gradients(*args: Any, **kwargs: Any) -> dict[str, Tensor]:  # noqa: D417 - see `_loss_and_gradients`
    r"""Gradients of a whole model with a correction on its layers, from explicit Jacobians.

    For every call of every corrected layer, with g_k the gradient of the loss at output row k,

    .. math:: \mathrm{grad}_p = \sum_k s_{p,k}\, J_{p,k}^\top g_k, \qquad
              f_{p,k} = \mathrm{tr}(J_{p,k} J_{p,k}^\top) / m,

    where m is the number of output features and s comes from `correction.scales(f)`. Output rows are the
    leading dimensions of a layer's output and its features the last one; for convolutions rows are
    positions and features the channels of a group. For nn.Linear f is |x|² and 1, so that `Proportional()`
    is 1/(|x|²+1) (Bird 2025, Eq. 20). g_k is backpropagated plainly.

    Args:
        model: the model, without attached corrections; it is run once, in the mode it is in.
        loss_fn: called with the model's output and the targets; returns a scalar.
        inputs: a tensor, or a tuple of arguments, for the model.
        targets: handed to `loss_fn`.
        correction: the rule; None gives plain gradients, still through Jacobians.
        layers: paths of the modules to correct. By default every module without submodules that owns a
            trainable parameter, but for norms, embeddings and the like (`PLAIN_BY_DEFAULT`). All tensor
            arguments of a layer must have samples as their first dimension. A parametrized layer is taken
            as it is trained, by the Jacobian of its parametrization's own parameters; `attach` corrects
            the gradient of the effective weight instead.
        chunk_size: samples whose Jacobians are held at once; memory is chunk_size × outputs × parameters
            of the largest layer. None is the whole batch, and so is any number for `BatchIdeal`, which
            needs all rows together.

    Returns:
        Parameter path → gradient, for every trainable parameter that the loss depends on.

    Raises:
        TypeError: the correction is no `Correction`.
        ValueError: a correction is attached to the model, or `layers` names one that is not there or inside another.

    Example:
        >>> import torch
        >>> from adiv_optim import Proportional, jacobian
        >>> model = torch.nn.Bilinear(1, 1, 1, bias=False)  # z = w·x·y, so J = x·y
        >>> x, y = torch.tensor([[2.0]]), torch.tensor([[3.0]])
        >>> loss = lambda output, target: (output - target).sum()
        >>> jacobian.corrected_gradients(model, loss, (x, y), torch.zeros(1), Proportional())["weight"].item()
        0.1666666716337204
    """
    return _loss_and_gradients("corrected_gradients", *args, **kwargs)[1]


@parameters_of(_loss_and_gradients)
def backward(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Add `corrected_gradients` to `p.grad`, as loss.backward() does, so that any optimizer can step on them.

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
    loss, gradients = _loss_and_gradients("backward", model, *args, **kwargs)
    for name, gradient in gradients.items():
        parameter = model.get_parameter(name)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return loss
