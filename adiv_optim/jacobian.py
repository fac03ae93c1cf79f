"""The corrections by explicit per-row Jacobians, for any module torch.func can differentiate.

Nothing here knows a closed form. A layer's Jacobians ∂z/∂θ come from vmap over jacrev, its divergence
factors are their traces, and a corrected gradient is the scaled contraction of Jacobians with output
gradients. For nn.Linear and nn.Conv1d/2d/3d it agrees with `attach` to rounding, at many times the cost
and memory: use it to train layers that have no closed form, and to check those that have.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from .attach import _Corrected
from .corrections import Correction, Solve, check_correction

#: Layers of torch.nn that keep the plain gradient unless they are named: `attach` leaves them alone too.
#: Batch normalisers could not be corrected at all: their samples have no Jacobian of their own.
PLAIN_BY_DEFAULT: tuple[type[nn.Module], ...] = (
    _NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.PReLU,
    nn.RNNBase,
)


def layer_jacobians(layer: nn.Module, *inputs: Tensor, chunk_size: int | None = None) -> dict[str, Tensor]:
    r"""Per-sample Jacobians :math:`J_k = \partial z_k / \partial\theta` of a layer, by vmap of jacrev.

    Args:
        layer: any module that treats the samples of its inputs separately.
        inputs: what the layer is called with; the first dimension of each tensor counts samples.
        chunk_size: how many samples are differentiated at once; None is all of them.

    Returns:
        For each trainable parameter a tensor of shape (samples, *output shape of a sample, *parameter shape).

    Raises:
        ValueError: the layer has no trainable parameter, or has a correction attached (its backward is not
            its derivative).

    Example:
        >>> import torch
        >>> from adiv_optim.jacobian import layer_jacobians
        >>> jacobians = layer_jacobians(torch.nn.Linear(3, 2), torch.ones(5, 3))
        >>> {name: tuple(jacobian.shape) for name, jacobian in jacobians.items()}
        {'weight': (5, 2, 2, 3), 'bias': (5, 2, 2)}
    """
    _refuse_attached(layer)
    if isinstance(layer, _NormBase):
        raise ValueError(f"{type(layer).__name__} mixes the samples of a batch; they have no Jacobian of their own.")
    trained = {name: p.detach() for name, p in layer.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(f"{type(layer).__name__} has no trainable parameter to take a Jacobian with respect to.")
    fixed = {name: p.detach() for name, p in layer.named_parameters() if not p.requires_grad}
    fixed |= dict(layer.named_buffers())

    def one_sample(trained: dict[str, Tensor], *sample: Tensor) -> Tensor:
        batch_of_one = tuple(tensor.unsqueeze(0) for tensor in sample)
        output: Tensor = functional_call(layer, {**trained, **fixed}, batch_of_one)
        return output.squeeze(0)

    in_dims = (None, *(0 for _ in inputs))
    per_sample = vmap(jacrev(one_sample), in_dims=in_dims, chunk_size=chunk_size)
    jacobians: dict[str, Tensor] = per_sample(trained, *(tensor.detach() for tensor in inputs))
    return jacobians


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
        inputs: what the model is called with: a tensor, or a tuple of arguments.
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
        ValueError: a correction is attached to the model, or `layers` names what is not there.

    Example:
        >>> import torch
        >>> from adiv_optim import Proportional, jacobian
        >>> model = torch.nn.Bilinear(1, 1, 1, bias=False)  # z = w·x·y, so J = x·y
        >>> x, y = torch.tensor([[2.0]]), torch.tensor([[3.0]])
        >>> loss = lambda output, target: (output - target).sum()
        >>> jacobian.corrected_gradients(model, loss, (x, y), torch.zeros(1), Proportional())["weight"].item()
        0.1666666716337204
    """
    return _loss_and_gradients(model, loss_fn, inputs, targets, correction, layers, chunk_size)[1]


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
    loss, gradients = _loss_and_gradients(model, loss_fn, inputs, targets, correction, layers, chunk_size)
    for name, gradient in gradients.items():
        parameter = model.get_parameter(name)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return loss


def _loss_and_gradients(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    correction: Correction | None,
    layers: Iterable[str] | None,
    chunk_size: int | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    if correction is not None:
        check_correction(correction)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it counts samples and must be at least 1, or None.")
    _refuse_attached(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no trainable parameter to give a gradient.")
    names = {id(parameter): name for name, parameter in parameters.items()}

    with torch.enable_grad():
        with _recorded(_choose_layers(model, layers)) as calls:
            output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        loss = loss_fn(output, targets)
        outputs = [call.output for call in calls]
        found = torch.autograd.grad(loss, [*outputs, *parameters.values()], allow_unused=True)

    gradients = {
        name: gradient for name, gradient in zip(parameters, found[len(calls) :], strict=True) if gradient is not None
    }
    for call, grad_output in zip(calls, found, strict=False):
        if grad_output is None:
            continue
        for local, gradient in _layer_gradients(call, grad_output, correction, chunk_size).items():
            name = names[id(call.layer.get_parameter(local))]
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return loss.detach(), gradients


class _Call(NamedTuple):
    """One call of a corrected layer."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]
    versions: tuple[int, ...]
    output: Tensor
    path: str


@contextmanager
def _recorded(layers: dict[str, nn.Module]) -> Iterator[list[_Call]]:
    """Record every call of the layers, whose own parameters are constants meanwhile.

    Their part in the gradient is left to the Jacobians; what autograd then finds for a parameter is the
    part of the modules that are not corrected, should it be shared with one.
    """
    calls: list[_Call] = []
    trained = {layer: [p for p in layer.parameters() if p.requires_grad] for layer in layers.values()}
    paths = {layer: path for path, layer in layers.items()}

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs or not all(isinstance(arg, Tensor) for arg in args):
            raise ValueError(
                f"layer {paths[layer]!r} ({type(layer).__name__}) was called with keyword or non-tensor "
                "arguments, which have no per-sample Jacobian; pass tensors by position or leave it out of `layers`."
            )
        for parameter in trained[layer]:
            parameter.requires_grad_(False)

    def after(layer: nn.Module, args: tuple[Tensor, ...], output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise ValueError(
                f"layer {paths[layer]!r} ({type(layer).__name__}) returned {type(output).__name__}; only a layer that "
                "returns one tensor has rows to correct: leave it out of `layers`."
            )
        for parameter in trained[layer]:
            parameter.requires_grad_(True)
        output = output if output.requires_grad else output.detach().requires_grad_()
        calls.append(_Call(layer, args, tuple(arg._version for arg in args), output, paths[layer]))
        # A clone, so that an in-place activation behind the layer leaves the recorded output alone.
        return output.clone()

    handles = []
    try:
        for layer in layers.values():
            handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(layer.register_forward_hook(after))
        yield calls
    finally:
        for handle in handles:
            handle.remove()
        for parameters in trained.values():
            for parameter in parameters:
                parameter.requires_grad_(True)


def _layer_gradients(
    call: _Call, grad_output: Tensor, correction: Correction | None, chunk_size: int | None
) -> dict[str, Tensor]:
    """Σ_k s_k J_kᵀ g_k over the rows of one call."""
    layer, inputs = call.layer, call.inputs
    if any(input._version != version for input, version in zip(inputs, call.versions, strict=True)):
        raise RuntimeError(
            f"an input of layer {call.path!r} ({type(layer).__name__}) was changed in place after the layer read it, "
            "so its Jacobian cannot be taken there; use the out-of-place operation."
        )
    if _is_unbatched(layer, inputs[0]):
        inputs, grad_output = (inputs[0].unsqueeze(0),), grad_output.unsqueeze(0)
    samples = len(grad_output)
    totals = {name: torch.zeros_like(p) for name, p in layer.named_parameters() if p.requires_grad}
    # A correction that needs all rows at once needs all Jacobians at once.
    step = chunk_size if chunk_size and (correction is None or correction.additive) else max(samples, 1)
    for start in range(0, samples, step):
        part = slice(start, start + step)
        jacobians = layer_jacobians(layer, *(tensor[part] for tensor in inputs), chunk_size=chunk_size)
        rows = _JacobianRows(
            {name: _as_rows(layer, jacobian, totals[name].dim()) for name, jacobian in jacobians.items()},
            _as_rows(layer, grad_output[part], 0),
        )
        gradients = correction.gradients(rows) if correction else rows.contract(dict.fromkeys(totals, torch.ones(())))
        for name, gradient in gradients.items():
            totals[name] += gradient.view_as(totals[name])
    return totals


@dataclass(frozen=True)
class _JacobianRows:
    """Rows whose Jacobians are known explicitly.

    Args:
        jacobians: J by parameter, shape (groups, rows, features, parameter size).
        grad_rows: g, shape (groups, rows, features).
    """

    jacobians: dict[str, Tensor]
    grad_rows: Tensor

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


def _as_rows(layer: nn.Module, tensor: Tensor, parameter_dims: int) -> Tensor:
    """(samples, *output, *parameter) → (groups, rows, features, parameter size), the last only if there is one.

    Only a grouped convolution has groups: it is as many layers side by side, each with rows of its own.
    """
    output_dims = tensor.dim() - parameter_dims
    groups = 1
    if isinstance(layer, _ConvNd):
        groups = layer.groups
        tensor = tensor.movedim(1, output_dims - 1)
    elif output_dims == 1:
        tensor, output_dims = tensor.unsqueeze(1), 2
    if parameter_dims:
        tensor = tensor.flatten(output_dims)
    return tensor.flatten(0, output_dims - 2).unflatten(1, (groups, -1)).movedim(1, 0)


def _is_unbatched(layer: nn.Module, input: Tensor) -> bool:
    if isinstance(layer, _ConvNd):
        return input.dim() == len(layer.kernel_size) + 1
    return isinstance(layer, nn.Linear) and input.dim() == 1


def _choose_layers(model: nn.Module, layers: Iterable[str] | None) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if layers is None:
        return {
            path: module
            for path, module in modules.items()
            if not isinstance(module, PLAIN_BY_DEFAULT)
            and all(name == "parametrizations" for name, _ in module.named_children())
            and "parametrizations" not in path.split(".")
            and any(parameter.requires_grad for parameter in module.parameters())
        }
    chosen = list(layers)
    for path in chosen:
        if path not in modules:
            raise ValueError(f"layers names {path!r}, which the model does not have; it has {list(modules)[:20]}.")
        if isinstance(modules[path], _NormBase):
            raise ValueError(
                f"layer {path!r} ({type(modules[path]).__name__}) mixes the samples of a batch, "
                "so they have no Jacobian of their own; leave it out of `layers`."
            )
    return {path: modules[path] for path in chosen}


def _refuse_attached(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, _Corrected):
            raise ValueError(
                f"layer {path!r} has a correction attached, so its backward is not its derivative; "
                "call adiv_optim.detach(model) first (the Jacobian path corrects by itself)."
            )
