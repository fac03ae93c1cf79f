"""The rows of one call of a layer: their gradient, their own movement, and that of the whole step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.conv import _ConvNd

from .._linalg.products import jvp
from ..jacobian.rows import is_unbatched

#: Numbers held at once by the parts that work on some rows at a time.
CHUNK = 2**22


@dataclass(frozen=True)
class MeasuredRows:
    """Some rows of a layer; movements are per unit of learning rate.

    Args:
        index: which rows these are, shape (n,).
        total: how many there were.
        grad: g, shape (n, features), and so are
        moved: J Δθ / η for the step as a whole, and
        own: what the row's own contribution to the gradient does.
        gains: parameter → its part of the own gain, shape (n,).
        squared_norm: |x|², shape (n,).
    """

    index: Tensor
    total: int
    grad: Tensor
    moved: Tensor
    own: Tensor
    gains: dict[str, Tensor]
    squared_norm: Tensor


def joined(parts: list[MeasuredRows]) -> MeasuredRows:
    """The rows of several calls as one, numbered on from call to call."""
    offsets = [sum(part.total for part in parts[:number]) for number in range(len(parts))]
    return MeasuredRows(
        index=torch.cat([part.index + offset for part, offset in zip(parts, offsets, strict=True)]),
        total=sum(part.total for part in parts),
        grad=torch.cat([part.grad for part in parts]),
        moved=torch.cat([part.moved for part in parts]),
        own=torch.cat([part.own for part in parts]),
        gains={name: torch.cat([part.gains[name] for part in parts]) for name in parts[0].gains},
        squared_norm=torch.cat([part.squared_norm for part in parts]),
    )


def evenly(total: int, wanted: int, device: torch.device) -> Tensor:
    """At most `wanted` indices below `total`, the same ones every time, evenly spaced from 0 on.

    Example:
        >>> evenly(10, 4, torch.device("cpu"))
        tensor([0, 2, 5, 7])
    """
    count = min(total, max(1, wanted))
    return torch.arange(count, device=device) * total // max(count, 1)


def to_float64(tensor: Tensor) -> Tensor:
    """In float64, so that |g|² of a small gradient does not underflow; Apple's devices have only float32."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def general_rows(
    layer: nn.Module, inputs: tuple[Tensor, ...], grad_output: Tensor, step: Mapping[str, Tensor], max_rows: int
) -> MeasuredRows:
    r"""Measure a layer that has no closed form, whose gradient is plain.

    .. math:: \mathrm{own}_k = -J_k J_k^\top g_k, \qquad \gamma_k = |J_k^\top g_k|^2 / |g_k|^2, \qquad
              \mathrm{moved}_k = J_k \Delta\theta / \eta

    with two passes backward and one forward per measured row under vmap.

    Args:
        layer: any module that treats the samples of its inputs separately.
        inputs: tensors whose first dimension counts samples.
        grad_output: of the shape of the layer's output, whose last dimension is a row's (a convolution's: channels).
        step: parameter → Δθ/η.
        max_rows: how many rows to measure.
    """
    if is_unbatched(layer, inputs[0]):
        inputs, grad_output = (inputs[0].unsqueeze(0),), grad_output.unsqueeze(0)
    trained = {name: p.detach() for name, p in layer.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in layer.named_parameters() if not p.requires_grad}
    fixed |= dict(layer.named_buffers())

    def rows_of(trained: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        return _as_rows(layer, functional_call(layer, {**trained, **fixed}, inputs))

    grad = _as_rows(layer, grad_output)
    samples, per_sample, features = grad.shape
    index = evenly(samples * per_sample, max_rows, grad.device)
    sample, place = index // per_sample, index % per_sample
    grad = grad[sample, place]
    length = to_float64(grad).norm(dim=-1)
    direction = (to_float64(grad) / length.unsqueeze(-1)).to(grad.dtype)

    def one_row(place: Tensor, direction: Tensor, *sample: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        def output(trained: dict[str, Tensor]) -> Tensor:
            rows = rows_of(trained, *(tensor.unsqueeze(0) for tensor in sample))[0]
            return rows.gather(0, place.expand(1, features)).squeeze(0)

        contribution = vjp(output, trained)[1](direction)[0]
        gains = {name: part.square().sum() for name, part in contribution.items()}
        return gains, jvp(output, trained, contribution)

    at_once = max(1, CHUNK // sum(p.numel() for p in trained.values()))
    per_row = vmap(one_row, randomness="different", chunk_size=at_once)
    gains, own = per_row(place, direction, *(tensor[sample] for tensor in inputs))
    present, back = sample.unique(return_inverse=True)
    part = tuple(tensor[present] for tensor in inputs)
    tangent = {name: step[name].to(p.dtype) for name, p in trained.items()}
    moved = jvp(lambda trained: rows_of(trained, *part), trained, tangent)
    return MeasuredRows(
        index=index,
        total=samples * per_sample,
        grad=to_float64(grad),
        moved=to_float64(moved[back, place]),
        own=-length.unsqueeze(-1) * to_float64(own),
        gains={name: to_float64(gain) for name, gain in gains.items()},
        squared_norm=_input_norms(layer, inputs, grad_output, sample, place),
    )


def _as_rows(layer: nn.Module, output: Tensor) -> Tensor:
    """(samples, …, features) → (samples, rows of a sample, features); channels of a group are a row's features."""
    if isinstance(layer, _ConvNd):
        return output.movedim(1, -1).unflatten(-1, (layer.groups, -1)).flatten(1, -2)
    if output.dim() == 1:
        return output.view(-1, 1, 1)
    return output.unsqueeze(1) if output.dim() == 2 else output.flatten(1, -2)


def _input_norms(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, sample: Tensor, place: Tensor) -> Tensor:
    # The last dimension of a convolution is no row's features, so that equal leading ones say nothing.
    by_row = not isinstance(layer, _ConvNd) and len(inputs) == 1 and inputs[0].dim() > 1
    if by_row and inputs[0].shape[:-1] == output.shape[:-1]:
        norms = to_float64(inputs[0]).square().sum(-1)
        return norms.view(len(norms), -1)[sample, place]
    return torch.stack([to_float64(tensor[sample]).flatten(1).square().sum(-1) for tensor in inputs]).sum(0)
