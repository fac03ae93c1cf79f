"""The network gauge: one log-scale for every channel of a network, by least squares over all its weights."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import _device
from .._distributed import Group, add_up, add_up_shards, cut_of, local_view
from .graph import ChannelGraph, Entry

#: A pass over the weights is the last one if it changes no log-scale by more than this.
_SMALL_CHANGE = 0.1
_MAX_PASSES = 5  # the first may detect zeros alone
#: Of conjugate gradients. The host waits for the device where it checks whether they are done.
_MAX_ITERATIONS, _ITERATIONS_PER_CHECK = 2000, 4
#: Weights whose logarithms are taken at once: on a CPU, temporaries within its cache take less time.
WEIGHTS_AT_ONCE = 2**18


@torch.no_grad()
def network_scales(graph: ChannelGraph, parameters: Mapping[str, Tensor], *, start: Tensor | None = None) -> Tensor:
    r"""Return the log-scales that leave the weights as near to their magnitude at initialisation as rescaling can.

    .. math:: \min_s \sum_{w_{oi} \ne 0} \left(\log|w_{oi}| - u - s_o + s_i\right)^2, \qquad
              u = -\tfrac12 \log(\text{fan in}) - 1, \qquad s = 0 \text{ where pinned}

    u is the mean of log|w| as PyTorch initialises the layer (for gains and embeddings their own). It does not depend
    on the weights, so any u is as blind to the gauge as u = 0, with which a network whose layers differ in width would
    be far from balanced as it is initialised: 3072 inputs, 32 hidden units and 10 outputs would slow the first layer's
    steps down by four orders of magnitude.

    Taking e^s off a network gives its balanced gauge. A network in another gauge t has the scales s + t, so that
    coordinates W' = D⁻¹WE⁻¹, D = exp(s_out), E = exp(−s_in), are blind to the gauge. Biases are not counted. Zero
    weights are left out: a channel takes its scale from its other weights, and without any it keeps that of `start`, or
    1. Channels that zeros cut off from every pinned one have scales only relative to each other; the weighted mean of
    their logarithms is that of `start`, or 0.

    All processes with a part of a sharded weight call this together, and have the same result. Zeros in such a weight
    are gathered, a byte for each of its elements.

    Args:
        graph: from `trace`.
        parameters: name → tensor, as `dict(model.named_parameters())`.
        start: log-scales near the solution, such as an earlier step's; (graph.free,).

    Returns:
        (graph.free,), float64, on the device of the first of the graph's weights, or on the CPU if that has no float64.

    Raises:
        ValueError: a weight of the graph is missing, has another shape, or holds NaN or inf; or `start` has
            another shape.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from adiv_optim import gauge
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
        >>> graph = gauge.trace(model, torch.ones(1, 3).double())
        >>> before = gauge.network_scales(graph, dict(model.named_parameters()))
        >>> t = gauge.random_gauge(graph)
        >>> _ = gauge.apply_gauge(model, graph, t)
        >>> torch.allclose(gauge.network_scales(graph, dict(model.named_parameters())), before + t)
        True
    """
    entries = {name: entry for name, entry in graph.parameters.items() if entry.counted and entry.moves}
    graph.check(parameters, entries)
    devices = {name: parameters[name].device for name in entries}
    device = _device.with_float64(next(iter(devices.values()), torch.device("cpu")))
    if not entries:
        return torch.zeros(graph.free, dtype=torch.float64, device=device)
    key = ("laplacian", *devices.values())
    if key not in graph._cache:
        on_devices = {
            name: replace(entry, plus=entry.plus.to(devices[name]), minus=entry.minus.to(devices[name]))
            for name, entry in entries.items()
        }
        graph._cache[key] = Laplacian.of(graph.free, entries.values(), device), on_devices
    laplacian, entries = graph._cache[key]
    parts = dict[str, tuple[list[Tensor], Tensor]]()  # of this process: channels of both sides, and the weight
    for name, entry in entries.items():
        shape, sides = local_view(entry.shape, entry.sides, parameters[name])
        parts[name] = sides, _device.local(parameters[name]).detach().view(shape)
    scales = torch.zeros(graph.free + 1, dtype=torch.float64, device=device)
    if start is not None:
        graph.check_log_scales(start)
        scales[1:] = start
    eps = max(torch.finfo(_device.wide_dtype(weight)).eps for _, weight in parts.values())
    has_zeros = False
    for _ in range(_MAX_PASSES):
        sums = {
            name: (sides, _sums_of(weight, sides, scales, entries[name].expected_log_weight, has_zeros))
            for name, (sides, weight) in parts.items()
        }
        residual = _sums_by_channel(sums, parameters, scales)
        # log 0 = -inf: a sum that is not finite is the sign of a zero (or worse).
        if not has_zeros and not all(_device.read(residual.isfinite().all())):
            _refuse_nan_and_inf({name: weight for name, (_, weight) in parts.items()}, parameters)
            has_zeros = True
            zeros = (_device.whole(parameters[name].detach() == 0).view(entry.shape) for name, entry in entries.items())
            laplacian = laplacian.without(entries.values(), zeros)
            continue
        residual[0] = 0  # the pinned channel keeps its scale
        change = laplacian.solve(residual, scales, eps)
        scales += change
        # Sums round in proportion to their size, which is that of the change: a small one needs no second pass.
        if all(_device.read(~(change.abs().max() > _SMALL_CHANGE))):
            break
    return scales[1:]


def _sums_by_channel(
    sums: Mapping[str, tuple[list[Tensor], tuple[Tensor, Tensor]]], parameters: Mapping[str, Tensor], scales: Tensor
) -> Tensor:
    """Add up `_sums_of` weights by channel, and over the processes that share a parameter."""
    by_group: dict[Group, list[tuple[Tensor, Tensor]]] = {}
    for name, (sides, of_sides) in sums.items():
        cut = cut_of(parameters[name])
        by_group.setdefault(cut and cut.group, []).extend(zip(sides, of_sides, strict=True))
    totals = []
    for group, pairs in by_group.items():
        ids = torch.cat([side.flatten().to(scales.device) for side, _ in pairs])
        of_ids = torch.cat([of_side.to(scales.device) for _, of_side in pairs])
        totals.append(torch.zeros_like(scales).index_add_(0, ids, of_ids.double()))
        if group is not None:
            add_up(totals[-1:], group)
    return torch.stack(totals).sum(0)


def _refuse_nan_and_inf(weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a weight holds NaN or inf, on all processes with a part of it."""
    has = {name: torch.stack([weight.isnan().any(), weight.isinf().any()]).long() for name, weight in weights.items()}
    add_up_shards((parameters[name], nan_and_inf) for name, nan_and_inf in has.items())
    for name, (nan, inf) in has.items():
        if nan or inf:
            kind = "NaN" if nan else "inf"
            raise ValueError(f"{name!r} holds {kind}; a weight without a magnitude has no scale.")


def _sums_of(weight: Tensor, sides: list[Tensor], scales: Tensor, u: float, has_zeros: bool) -> tuple[Tensor, Tensor]:
    """Sum log|w| − u − s_o + s_i, without zeros if there are, by s_out, and the negative by s_in; flat."""
    scales = scales.to(weight.device, _device.widest_dtype(weight.device))
    weight = weight.view(weight.shape or (1,))  # a learned factor of a single number has no dimension
    plus, minus = (scales[side].view(side.shape or (1,)) for side in sides)
    plus = plus + u
    sums = torch.zeros_like(plus), torch.zeros_like(minus)
    rows = max(1, WEIGHTS_AT_ONCE // max(1, weight[:1].numel()))
    for start in range(0, len(weight), rows):
        slices = (t[start : start + rows] if len(t) > 1 else t for t in (weight, plus, minus, *sums))
        part, plus_part, minus_part, *sums_part = slices
        log = _device.at_least_float32(part.abs()).log_()
        log -= plus_part.to(log.dtype)
        log += minus_part.to(log.dtype)
        if has_zeros:
            log.masked_fill_(part == 0, 0.0)
        # The kernel of a convolution first: the sums over it are few.
        log = log.sum_to_size(torch.broadcast_shapes(plus_part.shape, minus_part.shape))
        for total in sums_part:
            total += log.sum_to_size(total.shape)
    return sums[0].flatten(), -sums[1].flatten()


@dataclass(frozen=True, eq=False)
class Laplacian:
    r"""The normal equations of the network gauge, N = diag(d) − BᵀMB − (edges), with the pinned channel in place 0.

    A weight block without zeros joins every output to every input with the same strength κ, the size of its
    kernel. It acts on a vector through two sums alone, over the *set* of its outputs and that of its inputs:
    :math:`(Ns)_o = d_o s_o - \kappa \sum_i s_i`. B sums over sets, M swaps the two of a block and multiplies
    by κ. A grouped convolution has a block per group, a per-channel gain one per channel.
    """

    degree: Tensor  # d, how many weights touch each channel; (free + 1,)
    gather: Tensor  # the channel of every row and column sum, entry by entry
    members: Tensor  # the channels of all sets, one set after another
    set_of_member: Tensor  # sets 2k and 2k + 1 are the outputs and the inputs of a block
    strength: Tensor  # κ of each set's block
    edges: tuple[Tensor, Tensor] | None = None  # (two channels each, strength each): where a block has zeros

    @classmethod
    def of(cls, free: int, entries: Iterable[Entry], device: torch.device) -> "Laplacian":
        """Build the equations of weights without zeros."""
        no_ids = torch.zeros(0, dtype=torch.long, device="cpu")  # where ids are, under any default device
        gather, degrees, members, set_of_member, strengths = [], [], [no_ids], [no_ids], list[float]()
        for entry in entries:
            elements = math.prod(entry.shape)
            gather += [side.flatten() for side in entry.sides]
            degrees += [torch.full_like(ids, elements / len(ids), dtype=torch.float64) for ids in gather[-2:]]
            if all(bool(side.any()) for side in entry.sides):
                outputs, inputs = (_by_block(side, entry) for side in entry.sides)
                strength = elements / (outputs.numel() * inputs.shape[1])
                for number, sets in enumerate((outputs, inputs)):
                    numbers = len(strengths) + number + torch.arange(0, 2 * len(sets), 2, device="cpu")
                    members.append(sets.flatten())
                    set_of_member.append(numbers.repeat_interleave(sets.shape[1]))
                strengths += [strength] * (2 * len(outputs))
        channels = torch.cat(gather)
        degree = no_ids.new_zeros(free + 1, dtype=torch.float64).index_add_(0, channels, torch.cat(degrees))
        return cls(
            degree=degree.to(device),
            gather=channels.to(device),
            members=torch.cat(members).to(device),
            set_of_member=torch.cat(set_of_member).to(device),
            strength=torch.tensor(strengths, dtype=torch.float64, device=device),
        )

    def without(self, entries: Iterable[Entry], zeros: Iterable[Tensor]) -> "Laplacian":
        """Return the equations without the weights that are zero: edges take them away from the full blocks."""
        zeros_of_sides, ends, amounts, device = [], [], [], self.degree.device
        for entry, zero in zip(entries, zeros, strict=True):
            count = zero.long().sum_to_size(torch.broadcast_shapes(*(side.shape for side in entry.sides)))
            zeros_of_sides += [count.sum_to_size(side.shape).flatten().to(device) for side in entry.sides]
            places = count.nonzero(as_tuple=True)
            ends.append(torch.stack([side.expand(count.shape)[places] for side in entry.sides]).to(device))
            amounts.append(-count[places].to(device))
        degree = self.degree.index_add(0, self.gather, -torch.cat(zeros_of_sides).to(self.degree.dtype))
        channels, amount = torch.cat(ends, 1), torch.cat(amounts).to(degree.dtype)
        are_free = (channels > 0).all(0)
        return replace(self, degree=degree, edges=(channels[:, are_free], amount[are_free]))

    def times(self, scales: Tensor) -> Tensor:
        """Return N s, with 0 in the pinned place."""
        sums = torch.zeros_like(self.strength).index_add_(0, self.set_of_member, scales[self.members])  # B s
        across = (self.strength * sums.view(-1, 2).flip(1).flatten())[self.set_of_member]  # M of it, for each member
        out = (self.degree * scales).index_add_(0, self.members, across, alpha=-1)
        if self.edges is not None:
            (first, second), amount = self.edges
            out.index_add_(0, first, amount * scales[second], alpha=-1)
            out.index_add_(0, second, amount * scales[first], alpha=-1)
        out[0] = 0
        return out

    def solve(self, right_side: Tensor, scales: Tensor, eps: float) -> Tensor:
        """Return the change of `scales` with N · change = right side; it is 0 in the pinned place and without weights.

        By conjugate gradients (Hestenes and Stiefel 1952) on :math:`D^{-1/2} N D^{-1/2}`, in as many steps as there are
        sets at most but for rounding and zeros; where that is singular, the solution of least norm.
        """
        root = torch.where(self.degree > 0, self.degree.rsqrt(), 0.0)
        residual = direction = root * right_side
        solution, gamma = torch.zeros_like(right_side), residual.square().sum()
        # Above the rounding of N s and of logarithms: where no channel is pinned, that has a part that no s explains.
        goal = eps * (16 * residual.norm() + (1 + scales.abs().max()) * len(scales) ** 0.5)
        for iteration in range(_MAX_ITERATIONS):
            is_open = gamma > goal.square()
            if iteration % _ITERATIONS_PER_CHECK == 0 and all(_device.read(~is_open)):
                break
            product = root * self.times(root * direction)
            # Once solved it must not go on: only rounding is left, which a singular system cannot solve.
            step = torch.where(is_open, gamma / (direction * product).sum(), 0.0)
            solution, residual = solution + step * direction, residual - step * product
            previous, gamma = gamma, residual.square().sum()
            direction = residual + torch.where(is_open, gamma / previous, 0.0) * direction
        return root * solution


def _by_block(side: Tensor, entry: Entry) -> Tensor:
    """Reshape to (blocks, members): dimensions along which both sides vary count blocks, the rest members."""
    both = [dim for dim in range(side.dim()) if all(each.shape[dim] > 1 for each in entry.sides)]
    rest = [dim for dim in range(side.dim()) if dim not in both]
    return side.permute([*both, *rest]).reshape(math.prod(side.shape[dim] for dim in both), -1)
