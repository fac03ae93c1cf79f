"""Jacobians of one layer, and the rows a correction sees in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from .._linalg.least_squares import Parts
from ..attach.checks import refuse_attached
from ..corrections import Correction, Solve
from .modules import as_rows, batched, mixes_samples, pure
from .recorder import Call

#: The remedy for a model that has corrections.
BY_ITSELF = (
    "its backward is not its derivative. Call adiv_optim.detach(model) first: the Jacobian path corrects by itself"
)


def layer_jacobians(layer: nn.Module, *inputs: Tensor, chunk_size: int | None = None) -> dict[str, Tensor]:
    r"""Per-sample Jacobians :math:`J_k = \partial z_k / \partial\theta` of a layer, by vmap of jacrev.

    Args:
        layer: any module that treats the samples of its inputs separately.
        inputs: the arguments of the layer; the first dimension of each tensor counts samples.
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
    if why := mixes_samples(layer):
        raise ValueError(f"{why}; they have no Jacobian of their own.")
    trained, run = pure(layer)
    if not trained:
        raise ValueError(f"{type(layer).__name__} has no trainable parameter to take a Jacobian with respect to.")

    def one_sample(trained: Parts, *sample: Tensor) -> Tensor:
        return run(trained, *(tensor.unsqueeze(0) for tensor in sample)).squeeze(0)

    in_dims = (None, *(0 for _ in inputs))
    per_sample = vmap(jacrev(one_sample), in_dims=in_dims, chunk_size=chunk_size)
    return per_sample(trained, *(tensor.detach() for tensor in inputs))


def layer_gradients(
    label: str, layer: nn.Module, call: Call, correction: Correction | None, chunk_size: int | None
) -> dict[str, Tensor]:
    """Σ_k s_k J_kᵀ g_k over the rows of one call."""
    inputs, grad_output = batched(layer, *call)
    samples = len(grad_output)
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    totals = {name: torch.zeros_like(_wide(p)) for name, p in trained.items()}
    # A correction that needs all rows at once needs all Jacobians at once.
    step = chunk_size if chunk_size and (correction is None or correction.additive) else max(samples, 1)
    for start in range(0, samples, step):
        part = slice(start, start + step)
        jacobians = layer_jacobians(layer, *(tensor[part] for tensor in inputs), chunk_size=chunk_size)
        rows = _JacobianRows(
            {name: as_rows(layer, _wide(jacobian), totals[name].dim()) for name, jacobian in jacobians.items()},
            as_rows(layer, _wide(grad_output[part])),
            label,
        )
        plain = dict.fromkeys(jacobians, rows.grad_rows.new_ones(()))
        gradients = correction.gradients(rows) if correction else rows.contract(plain)
        for name, gradient in gradients.items():
            totals[name] += gradient.view_as(totals[name])
    return {name: total.to(trained[name].dtype) for name, total in totals.items()}


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True)
class _JacobianRows:
    """Rows whose Jacobians are known: (groups, rows, features, parameter size); output gradients lack the last."""

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

    def ideal(self, solve: Solve) -> dict[str, Tensor]:
        kernel = reduce(torch.add, (j.flatten(1, 2) @ j.flatten(1, 2).mT for j in self.jacobians.values()))
        # Every output feature is a row of the Jacobian, so there are rows × features of them.
        mixed = solve(kernel, self.grad_rows.flatten(1).unsqueeze(-1), kernel.shape[-1]).view_as(self.grad_rows)
        return {name: torch.einsum("grm,grmp->p", mixed, jacobian) for name, jacobian in self.jacobians.items()}
