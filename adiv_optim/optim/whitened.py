"""Optimizers that step where the inputs of every layer are white: their idea of a step, measured by activations."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from .coordinates import Chart, Coordinates, Map
from .covariance import InputCovariance
from .roots import METHODS, roots

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Whitening(Map):
    r"""W~' = W~ R⁻¹ and G~' = G~ R for one weight, with its bias as a last column.

    Args:
        covariance: whose layer it is.
        both: R and R⁻¹ of every block, each (groups, d, d).
        keep_norm: give the mapped step the Frobenius norm that it had in the new coordinates.
    """

    def __init__(self, covariance: InputCovariance, both: list[tuple[Tensor, Tensor]], keep_norm: bool) -> None:
        self.keep_norm, self.groups, self.blocks = keep_norm, covariance.groups, covariance.blocks
        self.parameters = [p for p in (covariance.weight, covariance.bias) if p is not None]
        # One group needs no batch of products, which some libraries run on one thread.
        self.both = both if self.groups > 1 else [(inverse[0], root[0]) for inverse, root in both]

    def enter(self) -> None:
        """Write parameters and gradients in the new coordinates."""
        self.gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.saved = [p.detach().clone() for p in self.parameters]
        mapped = self._times(0, [self._matrix(gradient) for gradient in self.gradients])
        there = self._times(1, [self._matrix(value) for value in self.saved])
        # Fused optimizers read a gradient as if it were laid out as its parameter is, which the old one was.
        new = [
            torch.empty_like(old).copy_(gradient.reshape(old.shape))
            for old, gradient in zip(self.gradients, mapped, strict=True)
        ]
        for parameter, gradient in zip(self.parameters, new, strict=True):
            parameter.grad = gradient
        for parameter, value in zip(self.parameters, there, strict=True):
            parameter.copy_(value.reshape(parameter.shape))
        # What the parameter holds is rounded to its own precision.
        self.start = [
            self._matrix(p).clone() if p.dtype != v.dtype else v for p, v in zip(self.parameters, there, strict=True)
        ]

    def leave(self) -> None:
        """Give the weights what they were, and the step that was taken, mapped back."""
        moved = [self._matrix(p) - start for p, start in zip(self.parameters, self.start, strict=True)]
        step = self._times(0, moved)
        if self.keep_norm:
            before, after = _norm(moved), _norm(step)
            ratio = torch.where(after > 0, before / after, 1.0)
            step = [part.mul_(ratio) for part in step]
        for parameter, value, change, gradient in zip(self.parameters, self.saved, step, self.gradients, strict=True):
            change = change.reshape(parameter.shape)
            # Adding zero would make +0 of -0.
            parameter.copy_(torch.where(change == 0, value, value + change))
            parameter.grad = gradient
        del self.saved, self.start, self.gradients

    def _matrix(self, part: Tensor) -> Tensor:
        """A weight as (outputs, features), a bias as (outputs, 1), in the precision of the roots; groups in front."""
        shape = (self.groups, -1) if self.groups > 1 else (-1,)
        columns = part[0].numel() if part.dim() > 1 else 1
        return part.detach().reshape(*shape, columns).to(self.both[0][0].dtype)

    def _times(self, which: int, parts: list[Tensor]) -> list[Tensor]:
        """[W, b] times a root, block by block; without joining the two, which would copy W."""
        weight, *bias = parts
        products = []
        for number, block in enumerate(self.blocks):
            root = self.both[number][which]
            part = weight if len(self.blocks) == 1 else weight[..., block]
            if not bias or number < len(self.blocks) - 1:
                products.append(part @ root)
                continue
            products.append((part @ root[..., :-1, :-1]).addcmul_(bias[0], root[..., -1:, :-1]))
            bias = [(part @ root[..., :-1, -1:]).addcmul_(bias[0], root[..., -1:, -1:])]
        return [products[0] if len(products) == 1 else torch.cat(products, -1), *bias]


def _norm(parts: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts]))


class WhiteChart(Chart):
    """Coordinates in which the inputs of the layers of a model are white; see `Whitened` for the arguments."""

    def __init__(self, damping: float, decay: float, every: int, keep_norm: bool, root: str, synchronize: bool) -> None:
        self.damping, self.decay, self.every = damping, decay, every
        self.keep_norm, self.root, self.synchronize = keep_norm, root, synchronize
        #: What is whitened, and why everything else is not.
        self.layers: list[InputCovariance] = []
        self.plain: dict[str, str] = {}
        self.steps = 0
        self.both: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def maps(self) -> Iterable[Map]:
        """Return one map for each weight whose inputs were seen and that has a gradient."""
        if self._due():
            if self.synchronize:
                _sum_over_processes(self.layers)
            for layer in self.layers:
                if layer.absorb(self.decay):
                    self._find_roots(layer)
        maps = []
        for layer in self.layers:
            missing = [p.grad is None for p in (layer.weight, layer.bias) if p is not None]
            if layer.name not in self.both or all(missing):
                continue
            if any(missing):
                raise ValueError(
                    f"Whitened: of {layer.name!r} and its bias only one has a gradient; what of a layer trains must be "
                    "settled when Whitened is built. Freeze first, and build it again."
                )
            maps.append(Whitening(layer, self.both[layer.name], self.keep_norm))
        return maps

    def after_step(self) -> None:
        """Count the step, and let the forward passes before the next one gather if it measures."""
        self.steps += 1
        for layer in self.layers:
            layer.armed = self._due()

    def _due(self) -> bool:
        # While the average settles it is measured at every power of two.
        return self.steps % self.every == 0 or (self.steps < self.every and self.steps & (self.steps - 1) == 0)

    def _find_roots(self, layer: InputCovariance) -> None:
        mean, size = layer.mean(), sum(layer.sizes)
        if mean is None:
            return
        trace = torch.stack([block.diagonal(dim1=-2, dim2=-1).sum(-1) for block in mean]).sum(0)
        level = torch.where(trace > 0, trace / size, 1.0)  # a layer that has seen zeros alone keeps its own coordinates
        scale = trace / size + self.damping * level if self.keep_norm else torch.ones_like(level)
        condition = size / self.damping + 1
        self.both[layer.name] = [
            roots(block / scale[:, None, None], self.damping * level / scale, self.root, condition) for block in mean
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return covariances and the counter; the roots follow from them."""
        return {"steps": self.steps, "layers": {layer.name: layer.state_dict() for layer in self.layers}}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse the state of other layers."""
        found, known = state.get("layers", {}), {layer.name for layer in self.layers}
        if state and (unknown := found.keys() ^ known):
            raise ValueError(
                f"Whitened: the checkpoint's covariances and the model's differ in {sorted(unknown)}; whiten the same "
                "layers."
            )
        for layer in self.layers if state else ():
            layer.check_state_dict(found[layer.name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them from a checkpoint; an empty one makes the chart forget."""
        self.steps, self.both = state.get("steps", 0), {}
        for layer in self.layers:
            layer.reset()
            if state:
                layer.load_state_dict(state["layers"][layer.name])
                self._find_roots(layer)
            layer.armed = self._due()


class Whitened(Coordinates):
    r"""Let any optimizer step in coordinates in which the inputs of every layer are white.

    With A the running mean of :math:`\tilde x \tilde x^\top` over the rows x~ = (x, 1) that a layer reads,
    W~ = [W, b] and λ = damping × A's mean eigenvalue, the optimizer sees

    .. math:: \tilde W' = \tilde W (A + \lambda I)^{1/2}, \qquad \tilde G' = \tilde G (A + \lambda I)^{-1/2}

    and its step ΔW~' is added to the weights as :math:`\Delta\tilde W' (A + \lambda I)^{-1/2}`. Measured there, the
    length of a step is what it does to the activations. Plain SGD becomes :math:`\tilde G (A + \lambda I)^{-1}`, the
    step of `BatchIdeal`, times the number of rows; every other optimizer takes its own idea of a good step. (FOOF,
    Benzing 2022, and K-FAC's input factor are the case of SGD.)

    Goes on nn.Linear and nn.Conv1d/2d/3d whose weights the optimizer holds: rows are samples, tokens or patches, groups
    of a convolution each have an A. Everything else takes the plain step; `coverage` says which. A is gathered in
    forward passes in training mode and with gradients enabled, without keeping activations, and only before the steps
    that measure: every `every` steps, and at powers of two at first. Micro-batches add up, and so do the processes of
    torch.distributed. Rows whose gradients the optimizer's zero_grad() has dropped do not count; those of a training
    pass without a backward, or before a model's own zero_grad(), do, and activation checkpointing without re-entrance
    counts its rows twice. Build the optimizer before a compiled model's first call, which would not see the hooks.

    **Costs** three products of a weight with a matrix of its input's size per step; at a measurement X~ᵀX~ and a root.
    Memory: A and both roots, float32, for each layer; while the optimizer steps three copies of the weights.

    Conversion: with every=1, decay=0 and keep_norm=False, Whitened(SGD) at `damping` takes the step of `GradientOnly`
    with `BatchIdeal(damping × rows / columns)` times the number of rows, columns counting the bias.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS that reads only p and p.grad. For several on disjoint parameters
            (torch.optim.Muon for matrices, AdamW for the rest) wrap each, or only one.
        model: the model.
        damping: λ in units of A's mean eigenvalue. With keep_norm, large values give the optimizer as it is; below 1e-4
            float32 no longer resolves A's small eigenvalues.
        decay: how much the average of earlier measurements counts at each new one; 0 is the present batch alone.
        every: steps between two measurements.
        keep_norm: use A + λI divided by its mean eigenvalue, and give each layer's mapped step the Frobenius norm that
            the optimizer gave it, so that learning rates and weight decay carry over.
        root: "eigh", or "newton-schulz" by matrix products alone; see `roots`.
        max_dim: wider layers keep diagonal blocks of at most this size of A; None is no limit.
        synchronize: add A up over the processes of torch.distributed.

    Raises:
        TypeError: not an optimizer, or LBFGS.
        ValueError: nothing to whiten, another wrapper of coordinates inside, a setting out of its range, parameters
            without a shape yet or sharded by fully_shard; or in `step` a bias that was frozen since.

    Example:
        >>> import torch
        >>> from adiv_optim import Whitened
        >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0], [0.0, 10.0]])
        >>> opt = Whitened(torch.optim.SGD(model.parameters(), lr=0.5), model, damping=1e-6, keep_norm=False)
        >>> before = model(x)
        >>> before.sum().backward()  # both outputs' gradients are 1 …
        >>> opt.step()
        >>> (model(x) - before).flatten().detach().round(decimals=2)  # … and both move by -lr × 1 × 2 rows
        tensor([-1., -1.])
    """

    chart: WhiteChart

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        damping: float = 1.0,
        decay: float = 0.9,
        every: int = 10,
        keep_norm: bool = True,
        root: str = "eigh",
        max_dim: int | None = 1024,
        synchronize: bool = True,
    ) -> None:
        if not 0 < damping < float("inf"):
            raise ValueError(f"Whitened: damping is {damping}; it must be positive and finite.")
        if not 0 <= decay < 1:
            raise ValueError(f"Whitened: decay is {decay}; it must be at least 0 and below 1.")
        if every < 1 or (max_dim is not None and max_dim < 1):
            raise ValueError(f"Whitened: every is {every} and max_dim is {max_dim}; both must be at least 1.")
        if root not in METHODS:
            raise ValueError(f"Whitened: unknown root {root!r}; known are {', '.join(METHODS)}.")
        super().__init__(optimizer, model, WhiteChart(damping, decay, every, keep_norm, root, synchronize))
        self.max_dim = max_dim
        self._find_layers()
        if not self.chart.layers:
            reasons = "; ".join(f"{name} ({why})" for name, why in list(self.chart.plain.items())[:5])
            raise ValueError(
                "Whitened: no tensor the optimizer holds is the weight of a Linear or Conv layer that can be whitened: "
                f"{reasons}."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: as in torch, no hooks of the optimizer."""
        return {**super().__getstate__(), "max_dim": self.max_dim}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; rows seen before the next forward pass do not count any more."""
        super().zero_grad(set_to_none)
        for layer in self.chart.layers:
            layer.dropped = layer.pending is not None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer, and whiten what it brings."""
        super().add_param_group(param_group)
        self._find_layers()

    def _find_layers(self) -> None:
        held = {id(p) for group in self.param_groups for p in group["params"]}
        known = {layer.name: layer for layer in self.chart.layers}
        found, self.chart.plain = _find(self.model, held, self.max_dim, known)
        self.chart.layers = found

    def coverage(self) -> dict[str, str]:
        """Say of every parameter that the optimizer holds whether and how it is whitened."""
        found = {}
        for layer in self.chart.layers:
            sizes = layer.sizes
            how = f"{len(sizes)} blocks of {min(sizes)} to {max(sizes)} columns"
            how = f"{sizes[0]} columns" if len(sizes) == 1 else how
            seen = "whitened" if layer.name in self.chart.both else "not yet seen in training"
            found[layer.name] = f"{seen}, {how}"
            if layer.with_bias:
                found[layer.name.removesuffix("weight") + "bias"] = f"{seen}, with its weight"
        return {**found, **{name: f"plain: {why}" for name, why in self.chart.plain.items()}}

    def detach(self) -> nn.Module:
        """Take the hooks off the model; the optimizer goes on with plain steps."""
        for layer in self.chart.layers:
            for handle in layer.handles:
                handle.remove()
        self.chart.layers, self.chart.both = [], {}
        return self.model


def _find(
    model: nn.Module, held: set[int], max_dim: int | None, known: dict[str, InputCovariance]
) -> tuple[list[InputCovariance], dict[str, str]]:
    """The weights to whiten, `known` ones as they are, and why every other parameter that is held is not."""
    users: dict[int, list[nn.Module]] = {}
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if id(parameter) in held:
                users.setdefault(id(parameter), []).append(module)
                named.setdefault(id(parameter), (name, parameter))
    layers, plain = [], {}
    for key, modules in users.items():
        name, parameter = named[key]
        if why := _why_plain(name, parameter, modules):
            plain[key] = why
            continue
        bias = modules[0].bias
        with_bias = isinstance(bias, nn.Parameter) and bias.requires_grad and users.get(id(bias)) == modules
        blocks = _blocks(parameter[0].numel(), with_bias, max_dim)
        layers.append(known[name] if name in known else InputCovariance(name, modules, with_bias, blocks))
    for layer in layers:
        plain.pop(id(layer.bias), None)
    return layers, {named[key][0]: why for key, why in plain.items()}


def _why_plain(name: str, parameter: nn.Parameter, modules: list[nn.Module]) -> str:
    if is_lazy(parameter):
        raise ValueError(f"Whitened: {name!r} has no shape yet; run one batch through the model first.")
    if hasattr(parameter, "device_mesh"):
        raise ValueError(
            f"Whitened: {name!r} is sharded by fully_shard, and its rows would have to be gathered to map it; use "
            "DistributedDataParallel."
        )
    other = next((m for m in modules if not isinstance(m, _LAYERS)), None)
    if other is not None:
        return f"used by {type(other).__name__}"
    if any(isinstance(m, NonDynamicallyQuantizableLinear) for m in modules):
        return "MultiheadAttention uses it without calling the layer"
    if any(parametrize.is_parametrized(m) for m in modules):
        return "parametrized"
    if any(m._parameters.get("weight") is not parameter for m in modules):
        return "a bias without its weight" if name.endswith("bias") else "not a weight that the layer uses as it is"
    if not parameter.requires_grad:
        return "frozen when Whitened was built"
    return "complex" if parameter.is_complex() else ""


def _blocks(features: int, with_bias: bool, max_dim: int | None) -> list[slice]:
    """Nearly equal slices of the features, so that each, with the bias, stays within `max_dim`."""
    count = 1 if max_dim is None else -(-(features + with_bias) // max_dim)
    ends = [round(features * k / count) for k in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def _sum_over_processes(layers: list[InputCovariance]) -> None:
    """Add up what is pending over the processes of the default group, if there are any."""
    if not layers or not (distributed.is_available() and distributed.is_initialized()):
        return
    # Counts first and for all layers, so that every process takes part in the same sums.
    counts = torch.tensor([layer.pending_rows for layer in layers], device=layers[0].weight.device)
    distributed.all_reduce(counts)
    for layer, count in zip(layers, counts.tolist(), strict=True):
        if count:
            layer.pending = layer.no_rows() if layer.pending is None else layer.pending
            for block in layer.pending:
                distributed.all_reduce(block)
            layer.pending_rows = count
