"""Every wrapper by hand: rows unfolded one by one, explicit matrices, and the bare optimizer's own step on them.

A method is built from the settings that its wrapper has. It is told of every call of a layer (`saw`), changes the
gradients and maybe the weights that the bare optimizer finds (`enter`), and then what the step has left (`leave`).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tests.fuzz.networks import LAYERS, Network
from tests.fuzz.trainings import Training

#: What rows that are counted by hand have beside them: derivatives of x~ = (x, 1) end with it.
ZERO = 0.0


class AmbiguousError(Exception):
    """Two answers are right, and differ."""


@dataclass
class Call:
    """One call of a layer."""

    layer: Any
    rows: list[Tensor]  # for every group of its outputs, what each of them read: (rows, features)
    gradients: list[Tensor]  # for every group the loss's gradients at its outputs, (rows, outputs)
    one: float = 1.0  # what stands beside each row in the place of the bias


def rows(layer: Any, x: Tensor) -> list[Tensor]:
    """What a layer's weight multiplies, group by group; patches by a convolution with unit kernels."""
    if not isinstance(layer, _ConvNd):
        return [x.reshape(-1, x.shape[-1])]
    size, dims = layer.kernel_size, len(layer.kernel_size)
    x = x if x.dim() == dims + 2 else x.unsqueeze(0)
    around = [(n, n) for n in ([0] * dims if isinstance(layer.padding, str) else layer.padding)]
    if layer.padding == "same":
        totals = [gap * (length - 1) for length, gap in zip(size, layer.dilation, strict=True)]
        around = [(total // 2, total - total // 2) for total in totals]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, [n for both in reversed(around) for n in both], mode=mode)
    narrow = layer.in_channels // layer.groups
    units = torch.eye(narrow * math.prod(size)).view(-1, narrow, *size)
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    return [
        convolve(part, units, stride=layer.stride, dilation=layer.dilation).movedim(1, -1).flatten(0, -2)
        for part in x.split(narrow, 1)
    ]


def outputs(layer: Any, g: Tensor) -> list[Tensor]:
    """What belongs to a layer's outputs, in the order of `rows`."""
    if not isinstance(layer, _ConvNd):
        return [g.reshape(-1, g.shape[-1])]
    g = g if g.dim() == len(layer.kernel_size) + 2 else g.unsqueeze(0)
    return [part.movedim(1, -1).flatten(0, -2) for part in g.split(layer.out_channels // layer.groups, 1)]


def is_transposed(layer: Any) -> bool:
    return not isinstance(layer, (nn.Linear, _ConvNd))


def as_matrices(layer: Any, weight: Tensor) -> list[Tensor]:
    """A weight as (outputs, features) of every group."""
    if is_transposed(layer):
        return [weight.detach().T]
    return list(weight.detach().flatten(1).chunk(getattr(layer, "groups", 1)))


def from_matrices(layer: Any, parts: list[Tensor]) -> Tensor:
    if is_transposed(layer):
        return parts[0].T.contiguous()
    return torch.cat(parts).reshape(layer.weight.shape)


class Method:
    """What all have in common; by itself the bare optimizer."""

    def __init__(self, model: Network, training: Training, **settings: Any) -> None:
        self.model, self.training, self.settings = model, training, settings
        self.optimizer = training.optimizer(model)
        self.steps = 0

    @property
    def held(self) -> set[int]:
        """The ids of the parameters that the optimizer trains."""
        return {id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}

    def grow(self) -> None:
        """Let the optimizer have the parameters that come late."""
        self.training.grow(self.optimizer, self.model)

    def step(self) -> None:
        """All micro-batches of a step, and the step."""
        self.calls: list[Call] = []
        for parameter in self.model.parameters():
            parameter.grad = None
        for x, y in self.training.batches(self.steps):
            seen: list[tuple[Any, Tensor, Tensor]] = []
            with _listening(self.model, seen):
                loss = self.training.loss(self.model(x), y, self.steps)
            reached = [output for *_, output in seen if output.requires_grad]
            found = iter(torch.autograd.grad(loss, reached, retain_graph=True, allow_unused=True) if reached else ())
            for layer, read, output in seen:
                g = next(found) if output.requires_grad else None
                g = torch.zeros_like(output) if g is None else g
                self.calls.append(Call(layer, rows(layer, read.detach()), outputs(layer, g.detach())))
            if loss.requires_grad:
                loss.backward()
        self._check_calls()
        #: Rows that are counted by hand, which no gradient comes from.
        by_hand = [self.training.counted(self.model, self.steps)] if self.training.count else []
        self.counted = [Call(layer, rows(layer, read), [], ZERO) for layer, read in by_hand]
        norms = torch.cat([x.square().sum(1) for call in self.calls for x in call.rows])
        if bool(((norms > 0) & (norms < 1e-20)).any()):
            raise AmbiguousError("a row that is nothing but rounding")
        with torch.no_grad():
            self.enter()
            self.optimizer.step()
            self.leave()
        self.steps += 1

    def _check_calls(self) -> None:
        """The rows by hand give the plain gradients, where nothing but layers uses a weight."""
        for weight, layers in weights(self.model).items():
            if weight.grad is None or not all(isinstance(layer, LAYERS) for layer in layers):
                continue
            calls = [call for call in self.calls if call.layer in layers]
            plain = sum(outer(call, call.gradients) for call in calls)
            sizes = [
                float(x.norm() * g.norm()) for call in calls for x, g in zip(call.rows, call.gradients, strict=True)
            ]
            assert float((plain - weight.grad).abs().max()) <= 1e-12 * sum(sizes), "these are not the rows"

    def gradients(self) -> dict[str, Tensor]:
        """What p.grad is to be outside of the step."""
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def enter(self) -> None:
        self.left = self.gradients()

    def leave(self) -> None:
        pass


def weights(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Every parameter called weight, and the modules that own it."""
    found: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        if (weight := module._parameters.get("weight")) is not None:
            found.setdefault(weight, []).append(module)
    return found


def outer(call: Call, gradients: list[Tensor]) -> Tensor:
    """Σ_k g_k x_kᵀ, as the weight has it."""
    groups = zip(gradients, call.rows, strict=True)
    return from_matrices(call.layer, [sum(map(torch.outer, g, x), torch.zeros(())) for g, x in groups])


@contextmanager
def _listening(model: nn.Module, seen: list[Any]) -> Iterator[None]:
    note = lambda layer, args, output: seen.append((layer, args[0], output))  # noqa: E731
    handles = [layer.register_forward_hook(note) for layer in model.modules() if isinstance(layer, LAYERS)]
    yield
    for handle in handles:
        handle.remove()


def mean(numbers: Any) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers)
