"""RZ scaling, W = D W' E, of Rothblum and Zenios: by averages of logarithms, and around zeros by the network gauge."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _device
from .graph import ChannelGraph, Entry
from .network import network_scales


class RZScaling(NamedTuple):
    """A weight split into scales and a remainder without units, W = D W' E.

    Args:
        row_scale: the diagonal of D, shape (…, out); the output's unit.
        canonical: W', shape of W; without units.
        column_scale: the diagonal of E, shape (…, in), in = groups × in per group; 1 / the input's unit.
    """

    row_scale: Tensor
    canonical: Tensor
    column_scale: Tensor


@torch.no_grad()
def rz_scaling(weight: Tensor, *, groups: int = 1, kernel_dims: int = 0) -> RZScaling:
    r"""Split a weight into W = D W' E such that rescaling its rows or columns leaves W' as it is.

    .. math:: \prod_{j: W_{ij} \ne 0} |W'_{ij}| = 1 \text{ for every row } i, \qquad
              \prod_{i: W_{ij} \ne 0} |W'_{ij}| = 1 \text{ for every column } j,

    with positive diagonal D and E (Uhlmann, *Unit-Consistent (UC) Adjoint for GSD and Backprop in Deep Learning
    Applications*, Eq. 5; the scaling is that of Uhlmann 2018, SIAM J. Matrix Anal. Appl. 39(2), 781-800): all
    geometric means of |W'| over the non-zero entries of a row or a column are 1. W' is unique, with the signs and
    zeros of W.

    D and E are unique up to :math:`cD, E/c` on each connected component of the support (rows and columns joined by
    non-zero entries). Of these it is the one where :math:`\prod D_{ii} = \prod E_{jj}`, both products over the
    component's non-zero entries: scaling the weight by t scales D and E by :math:`\sqrt t`, and transposing it
    exchanges them. Rows and columns of zeros have scale 1. A convolution kernel is a matrix of channels with all
    positions of a channel pair in one place, one matrix per group (Eqs. 21 and 22).

    float16 and bfloat16 are computed in float32. The result carries no autograd graph.

    Args:
        weight: W, real or complex, shape (…, out, in / groups, *k) with `kernel_dims` dimensions in k. Leading
            dimensions are a batch.
        groups: of a grouped convolution; output channels of a group are neighbours, as in torch.
        kernel_dims: 0 for matrices, 1, 2, 3 for the weight of nn.Conv1d, nn.Conv2d, nn.Conv3d.

    Returns:
        `RZScaling`: (row_scale, canonical, column_scale), in the weight's dtype; the scales of a complex weight are
        real.

    Raises:
        TypeError: the weight is not of floating point.
        ValueError: it holds NaN or inf, has too few dimensions, or its rows cannot be cut into groups; or a
            scale would leave the range of its dtype, as the scales of long chains can.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[2.0, 8.0], [-2.0, 0.5]])
        >>> row_scale, canonical, column_scale = rz_scaling(weight)
        >>> canonical
        tensor([[ 0.5000,  2.0000],
                [-2.0000,  0.5000]])
        >>> torch.allclose(rz_scaling(weight * torch.tensor([100.0, 1.0])).canonical, canonical)
        True
    """
    check_weight(weight, groups, kernel_dims)
    *batch, out, inputs = weight.shape[: weight.dim() - kernel_dims]
    # A dimension each for groups and for all positions of the kernel: a matrix has one group and one position.
    positions = weight.shape[weight.dim() - kernel_dims :].numel()
    wide = weight.to(_device.with_float64(weight.device), _device.wide_dtype(weight))
    blocks = wide.reshape(*batch, groups, out // groups, inputs, positions)

    logs = blocks.abs().log_()
    row_logs, column_logs = _scales_without_zeros(logs)
    limit = -math.log(torch.finfo(weight.dtype).tiny)
    if not _are_within(limit, row_logs, column_logs):
        # A zero, NaN or inf anywhere in a matrix is in every one of its means.
        if not all(_device.read(logs.amax() < math.inf)):
            not_finite = ~weight.isfinite()
            first = not_finite.nonzero()[0].tolist()
            raise ValueError(
                f"rz_scaling: {int(not_finite.sum())} of the {weight.numel()} entries of the weight of shape "
                f"{tuple(weight.shape)} are NaN or inf, the first, {weight[tuple(first)].item()}, at {first}. They "
                "have no scale: go back to the last finite weights, and lower the learning rate or skip steps whose "
                "gradients are not finite."
            )
        row_logs, column_logs = _scales_around_zeros(blocks, row_logs, column_logs)
        if not _are_within(limit, row_logs, column_logs):
            largest = max(row_logs.abs().max().item(), column_logs.abs().max().item())
            raise ValueError(
                f"rz_scaling: a scale of this weight of shape {tuple(weight.shape)} is exp(±{largest:.1f}), out of "
                f"the range of {weight.dtype}, exp(±{limit:.1f}). Scale it in float64, weight.double(), or "
                "set entries to zero that are only noise."
            )
    del logs
    dtype = weight.dtype.to_real()
    rows, columns = row_logs.exp().to(dtype), column_logs.exp().to(dtype)
    # By the rounded scales, so that D W' E gives back the weight.
    canonical = (blocks / rows[..., :, None, None]).div_(columns[..., None, :, None])
    return RZScaling(
        rows.reshape(*batch, out).to(weight.device),
        canonical.reshape(weight.shape).to(weight),
        columns.reshape(*batch, groups * inputs).to(weight.device),
    )


def check_weight(weight: Tensor, groups: int, kernel_dims: int) -> None:
    """Refuse a weight that is not of floating point, has too few dimensions, or rows that do not make such groups."""
    if not (weight.is_floating_point() or weight.is_complex()):
        raise TypeError(
            f"rz_scaling: the weight is {weight.dtype}; scales need floating point, such as weight.float()."
        )
    if kernel_dims < 0 or weight.dim() < kernel_dims + 2:
        raise ValueError(
            f"rz_scaling: the weight has shape {tuple(weight.shape)}; with kernel_dims={kernel_dims} it must have at "
            f"least {max(kernel_dims, 0) + 2} dimensions, (out, in / groups, *kernel)."
        )
    out = weight.shape[weight.dim() - kernel_dims - 2]
    if groups < 1 or out % groups:
        raise ValueError(
            f"rz_scaling: groups is {groups} and the weight of shape {tuple(weight.shape)} has {out} rows; groups must "
            "be at least 1 and divide them."
        )


def _scales_without_zeros(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-scales of blocks (…, m, n, k) without zeros; not finite where there is one, 0 of an empty block."""
    if logs.numel() == 0:
        return logs.new_zeros(logs.shape[:-2]), logs.new_zeros(*logs.shape[:-3], logs.shape[-2])
    pairs = logs.mean(-1) if logs.shape[-1] > 1 else logs[..., 0]
    rows, columns = pairs.mean(-1), pairs.mean(-2)
    half = rows.mean(-1, keepdim=True) / 2
    return rows - half, columns - half


def _are_within(limit: float, row_logs: Tensor, column_logs: Tensor) -> bool:
    """Whether all log-scales are numbers of at most this size."""
    return all(_device.read(*((logs.abs() <= limit).all() for logs in (row_logs, column_logs))))


def _scales_around_zeros(blocks: Tensor, row_logs: Tensor, column_logs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-scales of blocks: of those with zeros by the network gauge, between free inputs and outputs."""
    rows, columns = row_logs.flatten(0, -2).clone(), column_logs.flatten(0, -2).clone()
    has_zeros = ~(rows.isfinite().all(-1) & columns.isfinite().all(-1))
    if not has_zeros.any():
        return row_logs, column_logs  # which are out of range
    weight = blocks.flatten(0, -4)[has_zeros].abs().double()
    count, m, n, _ = weight.shape
    outputs, inputs = torch.arange(1, count * (m + n) + 1, device="cpu").split([count * m, count * n])
    entry = Entry(tuple(weight.shape), outputs.view(-1, m, 1, 1), inputs.view(-1, 1, n, 1), counted=True)
    graph = ChannelGraph(free=count * (m + n), parameters={"weight": entry}, buffers={})
    scales = network_scales(graph, {"weight": weight}).to(rows)
    rows[has_zeros], columns[has_zeros] = scales[: count * m].view(-1, m), -scales[count * m :].view(-1, n)
    return rows.view(row_logs.shape), columns.view(column_logs.shape)
