"""The optimizer in canonical coordinates by hand: a scale for every number that flows, and a dense least squares."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from tests.fuzz.by_hand import Method
from tests.fuzz.networks import Conv1D, Network
from tests.fuzz.trainings import Training

PINNED = 0
POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity, nn.Dropout)


@dataclass
class Moves:
    """How a parameter's entries move, w · exp(s[plus] − s[minus])."""

    plus: Tensor  # of the parameter's shape, as the other
    minus: Tensor
    usual: float | None  # mean of log|w| as PyTorch initialises it; None for what is no weight
    groups: int = 1  # of a convolution


@dataclass
class Channels:
    """A union-find over the numbers that flow for one sample."""

    above: list[int] = field(default_factory=lambda: [PINNED])  # of each scale one that it is the same as; PINNED is 1
    moves: dict[int, Moves] = field(default_factory=dict)  # parameter's id → how it moves

    def find(self, number: int) -> int:
        while self.above[number] != number:
            number = self.above[number]
        return number

    def join(self, one: Tensor, other: Tensor) -> None:
        """Let two tensors of numbers, broadcast, be the same scales."""
        for a, b in zip(*(part.flatten().tolist() for part in torch.broadcast_tensors(one, other)), strict=True):
            low, high = sorted((self.find(a), self.find(b)))
            self.above[high] = low

    def fresh(self, count: int) -> Tensor:
        start = len(self.above)
        self.above += range(start, start + count)
        return torch.arange(start, start + count)

    def pin(self, numbers: Tensor) -> None:
        self.join(numbers, torch.tensor(PINNED))

    def one(self, numbers: Tensor, dim: int) -> Tensor:
        """Let all positions but those along `dim` share, and return the vector along it."""
        rows = numbers.movedim(dim, 0).reshape(numbers.shape[dim], -1)
        self.join(rows, rows[:, :1])
        return rows[:, 0]

    def use(self, parameter: Tensor | None, plus: Tensor, minus: Tensor, usual: float | None, groups=1):
        if parameter is None:
            return
        plus, minus = plus.expand(parameter.shape), minus.expand(parameter.shape)
        first = self.moves.setdefault(id(parameter), Moves(plus, minus, usual, groups))
        self.join(first.plus, plus)
        self.join(first.minus, minus)


def follow(model: Network, x: Tensor) -> Channels:
    """The scales of a network, from the shapes of a batch."""
    channels = Channels()
    values, flows = [x], [torch.zeros(x.shape[1:], dtype=torch.long)]
    for step in model.steps:
        inputs = [flows[place] for place in step.inputs]
        with torch.no_grad():
            values.append(model.run(step, [values[place] for place in step.inputs]))
        shape = values[-1].shape[1:]
        if step.name == "call":
            flow = _called(channels, model.layers[step.layer], inputs[0], shape)
        elif step.name == "add":
            channels.join(*inputs)
            flow = inputs[0]
        elif step.name == "cat":
            flow = torch.cat(inputs, step.dims[0])
        elif step.name == "flatten":
            flow = inputs[0].flatten()
        elif step.name == "swap":
            flow = inputs[0].transpose(-1, -2)
        else:
            flow = channels.one(inputs[0], 0)
        flows.append(flow)
    channels.pin(flows[-1])
    return channels


def _called(channels: Channels, layer: Any, flow: Tensor, shape: torch.Size) -> Tensor:
    pinned = torch.tensor(PINNED)
    if isinstance(layer, HOMOGENEOUS):
        return flow
    if isinstance(layer, POOLS):
        return channels.one(flow, 0).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    if isinstance(layer, (nn.LayerNorm, nn.GroupNorm, _BatchNorm)):
        if isinstance(layer, _BatchNorm):
            channels.one(flow, 0)
        else:
            channels.pin(flow)
        if layer.weight is None:
            return torch.zeros_like(flow)
        out = channels.fresh(len(layer.weight))
        channels.use(layer.weight, out, pinned, 0.0)
        channels.use(layer.bias, out, pinned, None)
        return (out if isinstance(layer, nn.LayerNorm) else out.view(-1, *[1] * (len(shape) - 1))).expand(shape)
    if isinstance(layer, nn.Embedding):
        out = channels.fresh(layer.embedding_dim)
        channels.use(layer.weight, out, pinned, -0.6352)
        return out.expand(shape)
    if isinstance(layer, nn.Linear) or (Conv1D is not None and isinstance(layer, Conv1D)):
        into, transposed = channels.one(flow, -1), not isinstance(layer, nn.Linear)
        out = channels.fresh(shape[-1])
        ends = (out, into[:, None]) if transposed else (out[:, None], into)
        channels.use(layer.weight, *ends, usual(len(into)))
        channels.use(layer.bias, out, pinned, None)
        return out.expand(shape)
    if isinstance(layer, _ConvNd):
        into, out = channels.one(flow, 0), channels.fresh(layer.out_channels)
        ones = [1] * len(layer.kernel_size)
        ends = torch.stack([part for part in into.view(layer.groups, -1) for _ in range(len(out) // layer.groups)])
        fan_in = layer.weight[0].numel()
        where = (out.view(-1, 1, *ones), ends.view(*ends.shape, *ones))
        channels.use(layer.weight, *where, usual(fan_in), layer.groups)
        channels.use(layer.bias, out, pinned, None)
        return out.view(-1, *ones).expand(shape)
    channels.pin(flow)  # no homogeneous function
    return torch.zeros_like(flow)


def usual(fan_in: int) -> float:
    """Mean of log|w| for w uniform within ±1/√fan_in."""
    return -0.5 * math.log(fan_in) - 1


def network_scales(channels: Channels, model: nn.Module) -> dict[int, Tensor]:
    """Parameter's id → exp(s_plus − s_minus), by least squares over all weights that are not zero."""
    plus, minus, wanted = [], [], []
    roots = torch.tensor([channels.find(number) for number in range(len(channels.above))])
    for parameter in model.parameters():
        moves = channels.moves.get(id(parameter))
        if moves is None or moves.usual is None:
            continue
        nonzero = parameter != 0
        plus.append(roots[moves.plus[nonzero]])
        minus.append(roots[moves.minus[nonzero]])
        wanted.append(parameter.detach()[nonzero].abs().log() - moves.usual)
    scales = torch.zeros(len(roots))
    if wanted:
        scales = least_squares(torch.cat(plus), torch.cat(minus), torch.cat(wanted), len(roots), PINNED)[roots]
    return {key: (scales[moves.plus] - scales[moves.minus]).exp() for key, moves in channels.moves.items()}


def least_squares(plus: Tensor, minus: Tensor, wanted: Tensor, count: int, pinned: int = -1) -> Tensor:
    """Of the minima of Σ (s[plus] − s[minus] − wanted)² that where the sum of s weighted by its equations is 0.

    By the normal equations of the s that are in one: the equations themselves can be a quarter of a million. s[pinned]
    is 0.
    """
    used, (plus, minus) = torch.unique(torch.stack([plus, minus]), return_inverse=True)
    matrix, sums = torch.zeros(len(used), len(used)), torch.zeros(len(used))
    for own, other, values in ((plus, minus, wanted), (minus, plus, -wanted)):
        matrix.index_put_((own, own), torch.ones(()), accumulate=True)
        matrix.index_put_((own, other), -torch.ones(()), accumulate=True)
        sums.index_put_((own,), values, accumulate=True)
    free = (used != pinned).to(matrix.dtype)
    matrix, sums = free[:, None] * matrix * free, free * sums
    degree = matrix.diagonal()
    weight = torch.where(degree > 0, degree, 1.0).rsqrt()
    found = torch.linalg.lstsq(weight[:, None] * matrix * weight, (weight * sums)[:, None], driver="gelss").solution
    scales = torch.zeros(count)
    scales[used] = found[:, 0] * weight
    return scales


def layer_scales(weight: Tensor, groups: int) -> Tensor:
    """D E of one weight by the paper's U: log|w| − r_o − c_i has mean zero along both, within each group."""
    return torch.cat([_layer_scales(block) for block in weight.detach().chunk(groups)])


def _layer_scales(weight: Tensor) -> Tensor:
    rows, columns = weight.shape[:2]
    where = (weight != 0).nonzero()
    if not len(where):
        return torch.ones_like(weight)
    found = least_squares(where[:, 0], rows + where[:, 1], weight[weight != 0].abs().log(), rows + columns)
    r, c = found.split([rows, columns])
    factor = (r[:, None] - c).exp()
    return factor.view(rows, columns, *[1] * (weight.dim() - 2)).expand_as(weight)


class UnitConsistent(Method):
    """Steps on W / f with the gradient G f."""

    def __init__(self, model: Network, training: Training, **settings: Any) -> None:
        super().__init__(model, training, **settings)
        self.channels = follow(model, training.inputs[0])
        self.factors: dict[int, Tensor] = {}

    def enter(self) -> None:
        self.left = self.gradients()
        if self.steps % self.settings["every"] == 0:
            self._measure()
        self.mapped = []
        for parameter in self.model.parameters():
            if parameter.grad is None or id(parameter) not in self.factors:
                continue
            factor = self.factors[id(parameter)]
            self.mapped.append((parameter, factor))
            parameter.grad = parameter.grad * factor
            parameter /= factor

    def _measure(self) -> None:
        self.factors = network_scales(self.channels, self.model)
        if self.settings["gauge"] == "layer":
            for parameter in self.model.parameters():
                moves = self.channels.moves.get(id(parameter))
                if moves is not None and moves.usual is not None and parameter.dim() > 1:
                    # What zeros leave open is settled in the network gauge.
                    balance = self.factors.get(id(parameter), torch.ones_like(parameter))
                    own = layer_scales(parameter / balance, moves.groups)
                    self.factors[id(parameter)] = balance * own

    def leave(self) -> None:
        for parameter, factor in self.mapped:
            parameter *= factor
