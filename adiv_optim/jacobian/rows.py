"""Jacobians of one layer, and the rows a correction sees in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from ..attach.checks import refuse_attached
from ..corrections import Correction, Solve
from ._record import Call

#: What to do with a model that has corrections.
BY_ITSELF = (
    "its backward is not its derivative. Call adiv_optim.detach(model) first: the Jacobian path corrects by itself"
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
    refuse_attached("layer_jacobians", layer, BY_ITSELF)
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


def layer_gradients(
    call: Call, grad_output: Tensor, correction: Correction | None, chunk_size: int | None
) -> dict[str, Tensor]:
    """Σ_k s_k J_kᵀ g_k over the rows of one call."""
    layer, inputs = call.layer, call.inputs
    if any(input._version != version for input, version in zip(inputs, call.versions, strict=True)):
        raise RuntimeError(
            f"an input of layer {call.path!r} ({type(layer).__name__}) was changed in place after the layer read it, "
            "so its Jacobian cannot be taken there; use the out-of-place operation."
        )
    if is_unbatched(layer, inputs[0]):
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
            f"layer {call.path!r} ({type(layer).__name__})",
        )
        gradients = correction.gradients(rows) if correction else rows.plain()
        for name, gradient in gradients.items():
            totals[name] += gradient.view_as(totals[name])
    return totals


@dataclass(frozen=True)
class _JacobianRows:
    """Rows whose Jacobians are known explicitly.

    Args:
        jacobians: J by parameter, shape (groups, rows, features, parameter size).
        grad_rows: g, shape (groups, rows, features).
        label: of the layer, for error messages.
    """

    jacobians: dict[str, Tensor]
    grad_rows: Tensor
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

    def plain(self) -> dict[str, Tensor]:
        return self.contract(dict.fromkeys(self.jacobians, torch.ones(())))

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


def is_unbatched(layer: nn.Module, input: Tensor) -> bool:
    """Whether a convolution or a linear layer was called with one sample, without a dimension for samples."""
    if isinstance(layer, _ConvNd):
        return input.dim() == len(layer.kernel_size) + 1
    return isinstance(layer, nn.Linear) and input.dim() == 1
