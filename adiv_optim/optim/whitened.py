"""Optimizers that step where the inputs of every layer are white: their idea of a step, measured by activations."""

from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..sharding import refuse_sharded
from .coordinates import UNSHARDED, Coordinates
from .covariance import InputCovariance
from .roots import METHODS
from .whitening import WhiteChart

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


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
    Memory: A and both roots, float32, for each layer; while the optimizer steps three copies of the weights. With
    `rank` the products, the root and the memory beside A shrink to what `rank` columns take.

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
        rank: tell only this many leading eigenvectors of A apart, and let the others share the mean of their
            eigenvalues; None is the whole of A. They are followed from measurement to measurement by `leading`.
        max_dim: wider layers keep diagonal blocks of at most this size of A; None is no limit.
        synchronize: add A up over the processes of torch.distributed.

    Raises:
        TypeError: not an optimizer, or LBFGS.
        ValueError: nothing to whiten, another wrapper of coordinates inside, a setting out of its range, parameters
            without a shape yet or sharded; or in `step` a bias that was frozen since.

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
        rank: int | None = None,
        max_dim: int | None = 1024,
        synchronize: bool = True,
    ) -> None:
        if not 0 < damping < float("inf"):
            raise ValueError(f"Whitened: damping is {damping}; it must be positive and finite.")
        if not 0 <= decay < 1:
            raise ValueError(f"Whitened: decay is {decay}; it must be at least 0 and below 1.")
        for name, number in (("every", every), ("rank", rank), ("max_dim", max_dim)):
            if number is not None and number < 1:
                raise ValueError(f"Whitened: {name} is {number}; it must be at least 1.")
        if root not in METHODS:
            raise ValueError(f"Whitened: unknown root {root!r}; known are {', '.join(METHODS)}.")
        super().__init__(optimizer, model, WhiteChart(damping, decay, every, keep_norm, root, synchronize))
        refuse_sharded("Whitened", model, UNSHARDED)
        self.rank, self.max_dim = rank, max_dim
        self._find_layers()
        if not self.chart.layers:
            reasons = "; ".join(f"{name} ({why})" for name, why in list(self.chart.plain.items())[:5])
            raise ValueError(
                "Whitened: no tensor the optimizer holds is the weight of a Linear or Conv layer that can be whitened: "
                f"{reasons}."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: as in torch, no hooks of the optimizer."""
        return {**super().__getstate__(), "rank": self.rank, "max_dim": self.max_dim}

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
        found, self.chart.plain = _find(self.model, held, self.rank, self.max_dim, known)
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
    model: nn.Module, held: set[int], rank: int | None, max_dim: int | None, known: dict[str, InputCovariance]
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
        layers.append(known[name] if name in known else InputCovariance(name, modules, with_bias, blocks, rank))
    for layer in layers:
        plain.pop(id(layer.bias), None)
    return layers, {named[key][0]: why for key, why in plain.items()}


def _why_plain(name: str, parameter: nn.Parameter, modules: list[nn.Module]) -> str:
    if is_lazy(parameter):
        raise ValueError(f"Whitened: {name!r} has no shape yet; run one batch through the model first.")
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
