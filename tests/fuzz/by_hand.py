"""Every wrapper by hand: rows unfolded one by one, explicit matrices, and the bare optimizer's own step on them.

A method is built from the settings that its wrapper has. It is told of every call of a layer (`saw`), changes the
gradients and maybe the weights that the bare optimizer finds (`enter`), and then what the step has left (`leave`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tests.fuzz import channels as by_channel
from tests.fuzz.networks import LAYERS, Network, Training

#: The least divergence factor of the corrections.
EPS = 1e-12


class AmbiguousError(Exception):
    """Two answers are right, and differ."""


@dataclass
class Call:
    """One call of a layer.

    Args:
        layer: the layer.
        rows: for every group of its outputs, what each of them read: (rows, features).
        gradients: for every group the loss's gradients at its outputs, (rows, outputs); empty while not known.
    """

    layer: Any
    rows: list[Tensor]
    gradients: list[Tensor]


def patches(layer: Any, x: Tensor) -> list[Tensor]:
    """What a layer's weight multiplies, group by group; patches by a convolution with unit kernels."""
    if not isinstance(layer, _ConvNd):
        return [x.reshape(-1, x.shape[-1])]
    size, dims = layer.kernel_size, len(layer.kernel_size)
    if layer.padding == "same":
        around = [
            (total // 2, total - total // 2)
            for k, d in zip(size, layer.dilation, strict=True)
            if [total := d * (k - 1)]
        ]
    else:
        around = [
            (0, 0) if layer.padding == "valid" else (n, n)
            for n in (layer.padding if layer.padding != "valid" else size)
        ]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, [n for both in reversed(around) for n in both], mode=mode)
    narrow = layer.in_channels // layer.groups
    units = torch.eye(narrow * math.prod(size)).view(-1, narrow, *size)
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    return [
        convolve(part, units, stride=layer.stride, dilation=layer.dilation).movedim(1, -1).flatten(0, -2)
        for part in x.split(narrow, 1)
    ]


def by_rows(layer: Any, g: Tensor) -> list[Tensor]:
    """What belongs to the outputs, in the order of `patches`."""
    if not isinstance(layer, _ConvNd):
        return [g.reshape(-1, g.shape[-1])]
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
    """What all have in common; by itself the bare optimizer.

    Args:
        model: the network.
        training: what is done with it.
        settings: the wrapper's.
    """

    def __init__(self, model: Network, training: Training, **settings: Any) -> None:
        self.model, self.training, self.settings = model, training, settings
        self.optimizer = training.optimizer(model)
        self.held = {id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}
        self.steps = 0

    def step(self) -> None:
        """All micro-batches of a step, and the step."""
        self.calls: list[Call] = []
        for parameter in self.model.parameters():
            parameter.grad = None
        for x, y in self.training.batches(self.steps):
            seen: list[tuple[Any, Tensor, Tensor]] = []
            with _listening(self.model, seen):
                loss = self.training.loss(self.model(x), y, self.steps)
            outputs = [output for *_, output in seen if output.requires_grad]
            found = iter(torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True) if outputs else ())
            for layer, read, output in seen:
                g = next(found) if output.requires_grad else None
                g = torch.zeros_like(output) if g is None else g
                self.calls.append(Call(layer, patches(layer, read.detach()), by_rows(layer, g.detach())))
            if loss.requires_grad:
                loss.backward()
        self._check_calls()
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
            plain = sum(outer(call, call.gradients) for call in self.calls if call.layer in layers)
            assert torch.allclose(plain, weight.grad, rtol=1e-9, atol=1e-9 * float(weight.grad.abs().max())), "rows"

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
    parts = [
        sum(torch.outer(g, x) for g, x in zip(*rows, strict=True)) for rows in zip(gradients, call.rows, strict=True)
    ]
    return from_matrices(call.layer, parts)  # type: ignore[arg-type]


@contextmanager
def _listening(model: nn.Module, seen: list[Any]) -> Iterator[None]:
    note = lambda layer, args, output: seen.append((layer, args[0], output))  # noqa: E731
    handles = [layer.register_forward_hook(note) for layer in model.modules() if isinstance(layer, LAYERS)]
    yield
    for handle in handles:
        handle.remove()


# Corrections: p.grad itself is another one.


class Corrected(Method):
    """Rows whose pull on the layer's parameters is rescaled."""

    def enter(self) -> None:
        plain: dict[nn.Parameter, Tensor] = {}
        corrected: dict[nn.Parameter, Tensor] = {}
        for call in self.calls:
            layer, trained = call.layer, {n: p for n, p in call.layer.named_parameters() if p.requires_grad}
            sums = {"weight": outer(call, call.gradients), "bias": torch.cat([g.sum(0) for g in call.gradients])}
            parts = [self.of_group(x, g, list(trained)) for x, g in zip(call.rows, call.gradients, strict=True)]
            for name, parameter in trained.items():
                found = [part[name] for part in parts]
                new = from_matrices(layer, found) if name == "weight" else torch.cat(found)
                plain[parameter] = plain.get(parameter, 0) + sums[name]
                corrected[parameter] = corrected.get(parameter, 0) + new
        elsewhere = {p for p, owners in weights(self.model).items() if not all(isinstance(m, LAYERS) for m in owners)}
        for parameter, new in corrected.items():
            if parameter.grad is not None:
                parameter.grad = new + (parameter.grad - plain[parameter] if parameter in elsewhere else 0)
        self.left = self.gradients()

    def of_group(self, x: Tensor, g: Tensor, trained: list[str]) -> dict[str, Tensor]:
        """The gradients of one group of a call: (outputs, features) and (outputs,)."""
        raise NotImplementedError


def squared(x: Tensor) -> float:
    return float(sum(value * value for value in x.tolist()))


class Proportional(Corrected):
    """s_k = 1 / (|x_k|² + 1), counting what is trained."""

    def of_group(self, x: Tensor, g: Tensor, trained: list[str]) -> dict[str, Tensor]:
        weight, bias = torch.zeros(g.shape[1], x.shape[1]), torch.zeros(g.shape[1])
        for row, pull in zip(x, g, strict=True):
            total = squared(row) * ("weight" in trained) + ("bias" in trained)
            if total:
                weight += torch.outer(pull, row) / max(total, EPS)
                bias += pull / max(total, EPS)
        return {"weight": weight, "bias": bias}


class Disproportional(Corrected):
    """Each of the trained parameters gives an equal share of the ideal step."""

    def of_group(self, x: Tensor, g: Tensor, trained: list[str]) -> dict[str, Tensor]:
        weight, bias = torch.zeros(g.shape[1], x.shape[1]), torch.zeros(g.shape[1])
        for row, pull in zip(x, g, strict=True):
            if norm := squared(row):
                weight += torch.outer(pull, row) / (len(trained) * max(norm, EPS))
            bias += pull / len(trained)
        return {"weight": weight, "bias": bias}


class BatchIdeal(Corrected):
    """The step θ of least |X~θ − G|² + λ|θ|², by stacking √λ below X~."""

    def of_group(self, x: Tensor, g: Tensor, trained: list[str]) -> dict[str, Tensor]:
        columns = [x] * ("weight" in trained) + [torch.ones(len(x), 1)] * ("bias" in trained)
        if not columns:
            return {}
        joined = torch.cat(columns, 1)
        ridge = self.settings["damping"] * mean(map(squared, joined))
        below = math.sqrt(ridge) * torch.eye(joined.shape[1])
        right = torch.cat([g, torch.zeros(len(below), g.shape[1])])
        found = torch.linalg.lstsq(torch.cat([joined, below]), right, driver="gelsd").solution
        found *= len(x) if self.settings["per_sample"] else 1
        return {"weight": found[: x.shape[1]].T, "bias": found[-1]}


def mean(numbers: Any) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


# Optimizers that remember the inputs.


@dataclass
class Memory:
    """What is known of the inputs of one weight.

    Args:
        weight: the weight.
        bias: the bias, if it goes with it.
        layer: one that it is of.
        layers: all of them.
        total: Σ x~ x~ᵀ of every group, older ones counting less.
        rows: how many, likewise.
        found: what is made of it, by group and block.
        vectors: of the last measurement, by group and block.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    layer: Any
    layers: list[nn.Module]
    total: list[Tensor] | None = None
    rows: float = 0.0
    found: list[list[Any]] | None = None
    vectors: dict[tuple[int, int], Tensor] | None = None

    def matrices(self, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """[W, b] of every group."""
        parts = as_matrices(self.layer, weight)
        if bias is None:
            return [part.clone() for part in parts]
        return [
            torch.cat([part, b[:, None]], 1) for part, b in zip(parts, bias.detach().chunk(len(parts)), strict=True)
        ]

    def split(self, joined: list[Tensor]) -> dict[nn.Parameter, Tensor]:
        """Of [W, b], what belongs to the parameters."""
        if self.bias is None:
            return {self.weight: from_matrices(self.layer, joined)}
        found = from_matrices(self.layer, [part[:, :-1] for part in joined])
        return {self.weight: found, self.bias: torch.cat([part[:, -1] for part in joined])}


class ByInputs(Method):
    """Covariances of what the layers read."""

    def __init__(self, model: Network, training: Training, **settings: Any) -> None:
        super().__init__(model, training, **settings)
        self.memories = []
        owners: dict[nn.Parameter, list[nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, []).append(module)
        for weight, layers in weights(model).items():
            if id(weight) in self.held and all(type(layer) in LAYERS for layer in layers):
                bias: Any = layers[0].bias
                both = bias is not None and id(bias) in self.held and owners[bias] == layers
                self.memories.append(Memory(weight, bias if both else None, layers[0], layers))

    def enter(self) -> None:
        self.left = self.gradients()
        every = self.settings["every"]
        if self.steps % every == 0 or (self.steps < every and self.steps in (1, 2, 4, 8)):
            for memory in self.memories:
                self._measure(memory)
        self.there = []
        for memory in self.memories:
            if memory.found is not None and memory.weight.grad is not None:
                self.map(memory)

    def _measure(self, memory: Memory) -> None:
        calls = [call for call in self.calls if call.layer in memory.layers]
        if not calls:
            return
        decay = self.settings["decay"] if memory.total else 0.0
        sums: list[Any] = [decay * total for total in memory.total or [0] * len(calls[0].rows)]
        memory.rows *= decay
        for call in calls:
            memory.rows += len(call.rows[0])
            for group, x in enumerate(call.rows):
                joined = x if memory.bias is None else torch.cat([x, torch.ones(len(x), 1)], 1)
                sums[group] = sums[group] + sum(torch.outer(row, row) for row in joined)
        memory.total = sums
        memory.found = [self._of_group(memory, group, total / memory.rows) for group, total in enumerate(sums)]

    def _of_group(self, memory: Memory, group: int, covariance: Tensor) -> list[Any]:
        size = len(covariance)
        level = mean(covariance.diagonal().tolist())
        ridge = ridge_of(self.settings["damping"], level or 1.0)
        blocks = self.blocks(size, memory.bias is not None)
        return [
            (block, self.factor(memory, (group, number), covariance[block, block], ridge, level + ridge))
            for number, block in enumerate(blocks)
        ]

    def blocks(self, size: int, with_bias: bool) -> list[slice]:
        """Nearly equal parts of the features; the bias's 1 goes with the last."""
        most = self.settings["max_dim"] or size
        count, features = math.ceil(size / most), size - with_bias
        ends = [round(features * k / count) for k in range(count)] + [size]
        return [slice(a, b) for a, b in pairwise(ends)]

    def factor(self, memory: Memory, place: tuple[int, int], covariance: Tensor, ridge: float, scale: float) -> Any:
        """What one block's columns are multiplied with."""
        raise NotImplementedError

    def map(self, memory: Memory) -> None:
        """Change what the optimizer finds."""
        raise NotImplementedError

    def times(self, memory: Memory, joined: list[Tensor], which: int) -> list[Tensor]:
        """[W, b] times a factor, block by block."""
        assert memory.found is not None
        return [
            torch.cat([part[:, block] @ factors[which] for block, factors in found], 1)
            for part, found in zip(joined, memory.found, strict=True)
        ]


def ridge_of(damping: float, level: float) -> float:
    return damping * level


def set_gradients(parts: dict[nn.Parameter, Tensor]) -> None:
    for parameter, part in parts.items():
        parameter.grad = part.contiguous()


class Preconditioned(ByInputs):
    """G~ (A + λI)⁻¹ by a singular value decomposition."""

    def factor(self, memory: Memory, place: tuple[int, int], covariance: Tensor, ridge: float, scale: float) -> Any:
        u, s, _ = torch.linalg.svd(covariance)
        return [(u / (s + ridge)) @ u.T]

    def map(self, memory: Memory) -> None:
        joined = memory.matrices(memory.weight.grad, None if memory.bias is None else memory.bias.grad)
        set_gradients(memory.split(self.times(memory, joined, 0)))


class Whitened(ByInputs):
    """Steps on W~ (A + λI)^½ with the gradient G~ (A + λI)^-½."""

    def factor(self, memory: Memory, place: tuple[int, int], covariance: Tensor, ridge: float, scale: float) -> Any:
        rank, size = self.settings["rank"], len(covariance)
        u, s, _ = torch.linalg.svd(covariance)
        if rank is not None and rank < size:
            u, s = self._leading(memory, place, covariance, rank, u, s)
        values = (s + ridge) / (scale if self.settings["graft_norm"] else 1.0)
        return [(u * values.rsqrt()) @ u.T, (u * values.sqrt()) @ u.T]

    def _leading(self, memory: Memory, place: Any, a: Tensor, rank: int, u: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """All eigenvectors of what A is taken to be, and its eigenvalues: beyond the leading ones their mean."""
        memory.vectors = memory.vectors if memory.vectors is not None else {}
        size, tiny = len(a), 1e-4 * float(a.trace()) / len(a)
        if place in memory.vectors:
            basis, _ = torch.linalg.qr(a @ memory.vectors[place])
            turn, s, _ = torch.linalg.svd(basis.T @ a @ basis)
            u = basis @ turn
        elif s[rank - 1] - s[rank] <= tiny:
            raise AmbiguousError("a cut between equal eigenvalues")
        if s[rank - 1] <= tiny:
            raise AmbiguousError("fewer eigenvalues than the rank")
        memory.vectors[place] = u[:, :rank]
        rest = torch.linalg.svd(u[:, :rank]).U[:, rank:]
        level = (a.trace() - s[:rank].sum()) / (size - rank)
        return torch.cat([u[:, :rank], rest], 1), torch.cat([s[:rank], level.clamp(min=0).expand(size - rank)])

    def map(self, memory: Memory) -> None:
        start = memory.matrices(memory.weight, memory.bias)
        there = self.times(memory, start, 1)
        joined = memory.matrices(memory.weight.grad, None if memory.bias is None else memory.bias.grad)
        set_gradients(memory.split(self.times(memory, joined, 0)))
        for parameter, part in memory.split(there).items():
            parameter.copy_(part)
        self.there.append((memory, start, there))

    def leave(self) -> None:
        for memory, start, there in self.there:
            moved = [a - b for a, b in zip(memory.matrices(memory.weight, memory.bias), there, strict=True)]
            change = self.times(memory, moved, 0)
            before, after = (math.sqrt(sum(float(part.square().sum()) for part in parts)) for parts in (moved, change))
            ratio = before / after if after and self.settings["graft_norm"] else 1.0
            new = [part + ratio * step for part, step in zip(start, change, strict=True)]
            for parameter, part in memory.split(new).items():
                parameter.copy_(part)


# Coordinates by the weights.


class UnitConsistent(Method):
    """Steps on W / f with the gradient G f."""

    def __init__(self, model: Network, training: Training, **settings: Any) -> None:
        super().__init__(model, training, **settings)
        self.channels = by_channel.follow(model, training.inputs[0])
        self.factors: dict[int, Tensor] = {}

    def enter(self) -> None:
        self.left = self.gradients()
        if self.steps % self.settings["every"] == 0 or self.settings["project"]:
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
        self.factors = by_channel.network_scales(self.channels, self.model, self.settings["fan_in"])
        if self.settings["gauge"] == "layer":
            for parameter in self.model.parameters():
                moves = self.channels.moves.get(id(parameter))
                if moves is not None and moves.usual is not None and parameter.dim() > 1:
                    self.factors[id(parameter)] = by_channel.layer_scales(parameter, moves.groups)

    def leave(self) -> None:
        for parameter, factor in self.mapped:
            parameter *= factor
        if self.settings["project"]:
            factors = by_channel.network_scales(self.channels, self.model, self.settings["fan_in"])
            for parameter in self.model.parameters():
                parameter /= factors.get(id(parameter), 1.0)


METHODS: dict[str, Callable[..., Method]] = {
    "proportional": Proportional,
    "disproportional": Disproportional,
    "batch-ideal": BatchIdeal,
    "preconditioned": Preconditioned,
    "unit-consistent": UnitConsistent,
    "whitened": Whitened,
    "whitened-rank": Whitened,
}
