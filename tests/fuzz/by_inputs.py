"""The optimizers that remember what layers read, by hand: explicit covariances and singular values."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.by_hand import AmbiguousError, Method, as_matrices, from_matrices, mean, weights
from tests.fuzz.networks import LAYERS, Network
from tests.fuzz.trainings import Training

#: The golden section.
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass
class Memory:
    """What is known of the inputs of one weight."""

    weight: nn.Parameter
    bias: nn.Parameter | None  # if it goes with the weight
    layer: Any  # one that the weight is of
    layers: list[nn.Module]  # all of them
    total: list[Tensor] | None = None  # Σ x~ x~ᵀ of every group, older ones counting less
    rows: float = 0.0  # how many, likewise
    found: list[list[Any]] | None = None  # what is made of it, by group and block
    vectors: dict[tuple[int, int], Tensor] | None = None  # of the last measurement, by group and block
    last: list[float] | None = None  # what the weight was divided by when it was stepped on last

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

    with_bias = True

    def __init__(self, model: Network, training: Training, **settings: Any) -> None:
        super().__init__(model, training, **settings)
        self.memories: list[Memory] = []
        self._find()

    def grow(self) -> None:
        super().grow()
        self._find()

    def _find(self) -> None:
        """Remember all layers that the optimizer trains; anew where a bias has come to its weight."""
        owners: dict[nn.Parameter, list[nn.Module]] = {}
        known, held = {(id(memory.weight), memory.bias is not None) for memory in self.memories}, self.held
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, []).append(module)
        for weight, layers in weights(self.model).items():
            if id(weight) in held and all(type(layer) in LAYERS for layer in layers):
                bias: Any = layers[0].bias
                both = self.with_bias and bias is not None and id(bias) in held and owners[bias] == layers
                if (id(weight), both) not in known:
                    self.memories = [memory for memory in self.memories if memory.weight is not weight]
                    self.memories.append(Memory(weight, bias if both else None, layers[0], layers))

    def enter(self) -> None:
        self.left = self.gradients()
        every = self.settings["every"]
        first = self.steps < every and self.steps in (0, 1, 2, 4, 8)
        round_ = self.steps // every
        if first or (round_ and self.steps == round_ * every + math.floor(every * math.fmod(round_**2 * GOLDEN, 1))):
            for memory in self.memories:
                self._measure(memory)
        self.there = []
        for memory in self.memories:
            if memory.found is not None and memory.weight.grad is not None:
                self.map(memory)

    def _measure(self, memory: Memory) -> None:
        calls = [call for call in self.calls + self.counted if call.layer in memory.layers]
        if not calls:
            return
        decay = self.settings["decay"] if memory.total else 0.0
        sums: list[Any] = [decay * total for total in memory.total or [0] * len(calls[0].rows)]
        memory.rows *= decay
        for call in calls:
            memory.rows += len(call.rows[0])
            for group, x in enumerate(call.rows):
                joined = x if memory.bias is None else torch.cat([x, torch.full((len(x), 1), call.one)], 1)
                sums[group] = sums[group] + sum(torch.outer(row, row) for row in joined)
        memory.total = sums
        memory.found = [self._of_group(memory, group, total / memory.rows) for group, total in enumerate(sums)]

    def _of_group(self, memory: Memory, group: int, covariance: Tensor) -> list[Any]:
        size = len(covariance)
        level = mean(covariance.diagonal().tolist())
        ridge = ridge_of(self.settings["damping"], level or 1.0)
        blocks = self.blocks(size)
        return [
            (block, self.factor(memory, (group, number), covariance[block, block], ridge, level + ridge))
            for number, block in enumerate(blocks)
        ]

    def blocks(self, size: int) -> list[slice]:
        """Nearly equal parts of the columns, the bias's 1 among those of the last."""
        most = self.settings["max_dim"] or size
        count = math.ceil(size / most)
        ends = [size * k // count for k in range(count)] + [size]
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


def rms_of(mean_square: float) -> float:
    return math.sqrt(mean_square)


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
        rank, widths = self.settings["rank"], [block.stop - block.start for block in self.blocks(self._size(memory))]
        u, s, _ = torch.linalg.svd(covariance)
        if rank is not None and rank < min(widths):
            u, s = self._leading(memory, place, covariance, rank)
        values = (s + ridge) / (scale if self.settings["graft_norm"] else 1.0)
        return [(u * values.rsqrt()) @ u.T, (u * values.sqrt()) @ u.T]

    def _size(self, memory: Memory) -> int:
        assert memory.total is not None
        return len(memory.total[0])

    def _leading(self, memory: Memory, place: tuple[int, int], a: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """All eigenvectors of what A is taken to be, and its eigenvalues: beyond the leading ones their mean."""
        memory.vectors = memory.vectors if memory.vectors is not None else {}
        size, tiny = len(a), 1e-4 * float(a.trace()) / len(a)
        drawn = torch.randn(size, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        basis = memory.vectors.get(place, torch.linalg.svd(drawn, full_matrices=False).U)
        sketch = a @ basis
        u, s, _ = torch.linalg.svd(sketch @ torch.linalg.pinv(basis.T @ sketch) @ sketch.T)
        if s[rank - 1] <= tiny:
            raise AmbiguousError("fewer eigenvalues than the rank")
        memory.vectors[place] = u[:, :rank]
        level = (a.trace() - s[:rank].sum()) / (size - rank)
        values = torch.cat([s[:rank], level.clamp(min=0).expand(size - rank)])
        # All that is remembered of A, too.
        assert memory.total is not None
        group, number = place
        block = self.blocks(self._size(memory))[number]
        memory.total[group][block, block] = memory.rows * (u * torch.cat([s[:rank], level.expand(size - rank)])) @ u.T
        return u, values

    def map(self, memory: Memory) -> None:
        start = memory.matrices(memory.weight, memory.bias)
        there = self.times(memory, start, 1)
        joined = memory.matrices(memory.weight.grad, None if memory.bias is None else memory.bias.grad)
        set_gradients(memory.split(self.times(memory, joined, 0)))
        for parameter, part in memory.split(there).items():
            parameter.copy_(part)
        self.there.append((memory, start, there))

    def _kept(self, memory: Memory) -> list[Tensor]:
        """What of every entry of [W, b] is left by a decoupled decay, in whatever coordinates."""
        kept = {}
        for group in self.optimizer.param_groups:
            decoupled = type(self.optimizer).__name__ in ("AdamW", "Muon") or group.get("decoupled_weight_decay")
            decay = float(group["lr"]) * group["weight_decay"] if decoupled else 0.0
            kept |= {parameter: torch.full_like(parameter, 1 - decay) for parameter in group["params"]}
        return memory.matrices(kept[memory.weight], None if memory.bias is None else kept[memory.bias])

    def leave(self) -> None:
        for memory, start, there in self.there:
            kept, end = self._kept(memory), memory.matrices(memory.weight, memory.bias)
            moved = [a - c * b for a, c, b in zip(end, kept, there, strict=True)]
            change = self.times(memory, moved, 0)
            before, after = (math.sqrt(sum(float(part.square().sum()) for part in parts)) for parts in (moved, change))
            ratio = before / after if after and self.settings["graft_norm"] else 1.0
            new = [c * part + ratio * step for c, part, step in zip(kept, start, change, strict=True)]
            for parameter, part in memory.split(new).items():
                parameter.copy_(part)


class InputScaled(ByInputs):
    """Steps on W s with the gradient G / s, s = max(floor, r), r being of all groups."""

    with_bias = False

    def _measure(self, memory: Memory) -> None:
        super()._measure(memory)
        if memory.total:
            squares = mean(mean((total / memory.rows).diagonal().tolist()) for total in memory.total)
            memory.found = [max(self.settings["floor"], rms_of(squares))] * len(memory.total)

    def _of_group(self, memory: Memory, group: int, covariance: Tensor) -> list[Any]:
        return []

    def map(self, memory: Memory) -> None:
        assert memory.found is not None
        scales = (memory.last or memory.found) if self.settings["hold"] else memory.found
        start = memory.matrices(memory.weight, None)
        there = [s * part for s, part in zip(scales, start, strict=True)]
        joined = memory.matrices(memory.weight.grad, None)
        set_gradients(memory.split([part / s for s, part in zip(scales, joined, strict=True)]))
        memory.weight.copy_(memory.split(there)[memory.weight])
        self.there.append((memory, start, there))

    def leave(self) -> None:
        for memory, start, there in self.there:
            end = memory.matrices(memory.weight, None)
            if self.settings["hold"]:
                new = [part / s for part, s in zip(end, memory.found, strict=True)]
            else:
                moved = [(a - b) / s for a, b, s in zip(end, there, memory.found, strict=True)]
                new = [part + step for part, step in zip(start, moved, strict=True)]
            memory.weight.copy_(memory.split(new)[memory.weight])
            memory.last = memory.found
