"""What the wrappers do, written out for a perceptron: plain gradients, explicit matrices and a bare optimizer."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

DAMPING = 0.1
DECAY = 0.5
FLOOR = 0.3


@dataclass
class Call:
    """A linear layer, the rows x it read, the loss's gradients g at its output, and whether it is optimized.

    Of its parameters `left` is what a decoupled weight decay multiplies them by, where there is one.
    """

    layer: nn.Linear
    x: Tensor
    g: Tensor
    held: bool
    left: dict[nn.Parameter, float]

    @property
    def rows(self) -> Tensor:
        """X~: x, and a 1 if there is a bias."""
        return self.x if self.layer.bias is None else torch.cat([self.x, torch.ones(len(self.x), 1)], 1)

    @property
    def values(self) -> Tensor:
        """[W, b]."""
        return self._joined(self.layer.weight, self.layer.bias)

    @values.setter
    def values(self, joined: Tensor) -> None:
        for parameter, part in self._split(joined):
            parameter.data.copy_(part)

    @property
    def kept(self) -> Tensor:
        """What every entry of [W, b] is multiplied by."""
        parts = [torch.full_like(p, self.left.get(p, 1.0)) for p in self.layer.parameters()]
        return self._joined(parts[0], parts[1] if len(parts) == 2 else None)

    @property
    def gradient(self) -> Tensor:
        """The gradients of [W, b]."""
        return self._joined(self.layer.weight.grad, None if self.layer.bias is None else self.layer.bias.grad)

    @gradient.setter
    def gradient(self, joined: Tensor) -> None:
        for parameter, part in self._split(joined):
            parameter.grad = part

    def _joined(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return (weight if bias is None else torch.cat([weight, bias[:, None]], 1)).detach().clone()

    def _split(self, joined: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        parts = [joined[:, : self.layer.in_features], joined[:, -1]]
        # Fused optimizers read a gradient as if it were laid out as its parameter is.
        return list(zip(self.layer.parameters(), (part.contiguous() for part in parts), strict=False))


#: Changes what the bare optimizer finds, and after its step what it leaves.
Method = Callable[[list[Call]], AbstractContextManager[None]]


@contextmanager
def plain(calls: list[Call]) -> Iterator[None]:
    yield


@contextmanager
def proportional(calls: list[Call]) -> Iterator[None]:
    for call in calls:
        s = 1 / call.rows.square().sum(1, keepdim=True)
        call.gradient = (s * call.g).T @ call.rows
    yield


@contextmanager
def disproportional(calls: list[Call]) -> Iterator[None]:
    for call in calls:
        parameters = len(list(call.layer.parameters()))
        s = 1 / (parameters * call.x.square().sum(1, keepdim=True))
        weight, bias = (s * call.g).T @ call.x, call.g.sum(0)[:, None] / parameters
        call.gradient = torch.cat([weight, bias], 1) if parameters == 2 else weight
    yield


@contextmanager
def batch_ideal(calls: list[Call]) -> Iterator[None]:
    for call in calls:
        kernel = call.rows @ call.rows.T
        kernel += DAMPING * kernel.trace() / len(kernel) * torch.eye(len(kernel))
        call.gradient = (call.rows.T @ torch.linalg.inv(kernel) @ call.g).T
    yield


def preconditioned() -> Method:
    """A method, for it remembers."""
    sums: dict[nn.Linear, tuple[Tensor, float]] = {}

    @contextmanager
    def method(calls: list[Call]) -> Iterator[None]:
        plain = [(call, call.gradient) for call in calls if call.held]
        for call, gradient in plain:
            total, rows = sums.get(call.layer, (torch.zeros(()), 0.0))
            total, rows = sums[call.layer] = DECAY * total + call.rows.T @ call.rows, DECAY * rows + len(call.x)
            mean = total / rows
            ridge = DAMPING * mean.trace() / len(mean) * torch.eye(len(mean))
            call.gradient = gradient @ torch.linalg.inv(mean + ridge)
        yield
        for call, gradient in plain:
            call.gradient = gradient

    return method


@contextmanager
def unit_consistent(calls: list[Call]) -> Iterator[None]:
    factors = []
    for call, (s_in, s_out) in zip(calls, pairwise(_log_scales([call.layer for call in calls])), strict=True):
        columns = s_in if call.layer.bias is None else torch.cat([s_in, torch.zeros(1)])
        if call.held:
            factors.append((call, (s_out[:, None] - columns).exp()))
    for call, factor in factors:
        call.gradient, call.values = call.gradient * factor, call.values / factor
    yield
    for call, factor in factors:
        call.values = call.values * factor


def _log_scales(layers: list[nn.Linear]) -> list[Tensor]:
    """Least squares of log|w_oi| - u - s_o + s_i by a dense matrix, s = 0 at the network's inputs and outputs."""
    widths = [layers[0].in_features, *(layer.out_features for layer in layers)]
    channels = torch.eye(sum(widths)).split(widths)
    equations = torch.cat([(out[:, None] - into).flatten(0, 1) for into, out in pairwise(channels)])
    logs = [layer.weight.detach().abs().log() + 0.5 * math.log(layer.in_features) + 1 for layer in layers]
    wanted = torch.cat([log.flatten() for log in logs])[:, None]
    free = slice(widths[0], -widths[-1])
    scales = torch.zeros(sum(widths))
    scales[free] = torch.linalg.lstsq(equations[:, free], wanted).solution[:, 0]
    return list(scales.split(widths))


def whitened() -> Method:
    """A method, for it remembers."""
    sums: dict[nn.Linear, Tensor] = {}

    @contextmanager
    def method(calls: list[Call]) -> Iterator[None]:
        calls = [call for call in calls if call.held]
        mapped = []
        for call in calls:
            sums[call.layer] = total = DECAY * sums.get(call.layer, torch.zeros(())) + call.rows.T @ call.rows
            level = total.trace() / len(total)
            values, vectors = torch.linalg.eigh((total / level + torch.eye(len(total))) / 2)
            root, inverse = (vectors @ power.diag() @ vectors.T for power in (values.sqrt(), values.rsqrt()))
            start = call.values
            call.gradient, call.values = call.gradient @ inverse, start @ root
            mapped.append((call, start, start @ root, inverse))
        yield
        for call, start, there, inverse in mapped:
            moved = call.values - call.kept * there
            step = moved @ inverse
            call.values = call.kept * start + step * (moved.norm() / step.norm() if moved.any() else 1)

    return method


def input_scaled() -> Method:
    """A method, for it remembers."""
    sums: dict[nn.Linear, tuple[float, float]] = {}

    @contextmanager
    def method(calls: list[Call]) -> Iterator[None]:
        mapped = []
        for call in (call for call in calls if call.held):
            squares, count = sums.get(call.layer, (0.0, 0.0))
            sums[call.layer] = DECAY * squares + float(call.x.square().sum()), DECAY * count + call.x.numel()
            scale = max(FLOOR, math.sqrt(sums[call.layer][0] / sums[call.layer][1]))
            columns = torch.ones(call.rows.shape[1])  # the bias's stays 1
            columns[: call.x.shape[1]] = scale
            start = call.values
            call.gradient, call.values = call.gradient / columns, start * columns
            mapped.append((call, start, columns))
        yield
        for call, start, columns in mapped:
            call.values = start + (call.values - start * columns) / columns

    return method


#: Wrapper → returns what it does.
METHODS: dict[str, Callable[[], Method]] = {
    "proportional": lambda: proportional,
    "disproportional": lambda: disproportional,
    "batch-ideal": lambda: batch_ideal,
    "input-scaled": input_scaled,
    "preconditioned": preconditioned,
    "unit-consistent": lambda: unit_consistent,
    "whitened": whitened,
}
#: What the formulas are written for.
SETTINGS = {
    "input-scaled": {"every": 1, "decay": DECAY, "floor": FLOOR, "hold": False},
    "preconditioned": {"damping": DAMPING, "every": 1, "decay": DECAY},
    "unit-consistent": {"every": 1},
    "whitened": {"every": 1, "decay": DECAY},
}


class ByHand:
    """A bare optimizer that steps as a wrapper should.

    Args:
        optimizer: the bare optimizer.
        network: of linear layers.
        method: what to do around the optimizer's step.
    """

    def __init__(self, optimizer: Optimizer, network: nn.Module, method: Method) -> None:
        self.optimizer, self.network, self.method = optimizer, network, method

    def train(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Take a step for each batch."""
        for x, y in batches:
            self._step(x, y)

    def _step(self, x: Tensor, y: Tensor) -> None:
        layers = [layer for layer in self.network.modules() if isinstance(layer, nn.Linear)]
        self.optimizer.zero_grad()
        seen = backward(self.network, layers, x, y)
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        left = decays(self.optimizer)
        with self.method([Call(layer, x, g, id(layer.weight) in held, left) for layer, x, g in seen]):
            self.optimizer.step()


def decays(optimizer: Optimizer) -> dict[nn.Parameter, float]:
    """1 − ηλ of the parameters whose weight decay torch's own optimizers decouple, where both are numbers."""
    found = {}
    for group in optimizer.param_groups:
        always = type(optimizer).__name__ in ("AdamW", "Muon")
        if not isinstance(group["lr"], Tensor) and (always or group.get("decoupled_weight_decay")):
            found |= dict.fromkeys(group["params"], 1 - group["lr"] * group["weight_decay"])
    return found


def backward(
    network: nn.Module, layers: Iterable[nn.Module], x: Tensor, y: Tensor
) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """loss.backward(), and (layer, what it read, gradient of what it gave) for every call of the layers."""
    seen: list[tuple[nn.Module, tuple[Tensor], Tensor]] = []
    handles = [layer.register_forward_hook(lambda *call: seen.append(call)) for layer in layers]
    loss = F.cross_entropy(network(x), y)
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(loss, [output for *_, output in seen], retain_graph=True)
    loss.backward()
    return [(layer, input.detach(), g) for (layer, (input,), _), g in zip(seen, gradients, strict=True)]
