"""Modules as pure functions, products with their Jacobians, and the layers of a model that have rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from ..rows.models import layers_of, no_such_module, trainable

#: Several tensors that together are one vector.
Parts = dict[str, Tensor]

#: Layers of torch.nn that keep the plain gradient unless they are named: `attach` leaves them alone too.
#: In training batch normalisers could not be corrected at all: their samples have no Jacobian each.
PLAIN_BY_DEFAULT: tuple[type[nn.Module], ...] = (
    _NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.PReLU,
    nn.RNNBase,
)


def pure(module: nn.Module) -> tuple[Parts, Callable[..., Any]]:
    """Return the trained parameters, and the module as a function of them and its arguments, without side effects."""
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}

    def run(trained: Parts, *arguments: Any) -> Any:
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return call_with(module, {**trained, **fixed, **buffers}, arguments)

    return trained, run


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], arguments: tuple[Any, ...]) -> Any:
    """Call a module with some tensors in place of the parameters and buffers of these names, wherever they are shared.

    Every module is given its tensors once: torch's functional_call takes a module that stands at two paths for two, and
    leaves plain tensors in it.
    """
    first: dict[Tensor, str] = {}
    values = {}
    for path, part in module.named_modules():
        of_part = (part.named_parameters, part.named_buffers)
        for name, tensor in chain.from_iterable(each(path, False, remove_duplicate=False) for each in of_part):
            shared = first.setdefault(tensor, name)
            if shared in tensors:
                values[name] = tensors[shared]
    return functional_call(module, values, arguments, tie_weights=False)


def jvp(function: Callable[[Parts], Tensor], at: Parts, tangent: Parts) -> Tensor:
    """Return J · tangent, as the derivative of Jᵀu by u: torch lacks forward-mode rules for some operations."""
    output, pull = vjp(function, at)[:2]
    return vjp(lambda cotangent: pull(cotangent)[0], torch.zeros_like(output))[1](tangent)[0]


def generator_states(module: nn.Module) -> list[tuple[Any, tuple[torch.device, ...], Tensor]]:
    """List the random generators that a module may draw from: torch's module, the device its functions take, the state.

    torch.random.fork_rng does not know MPS, which has one device, and functions that take none.
    """
    generators: list[tuple[Any, tuple[torch.device, ...], Tensor]] = [(torch, (), torch.get_rng_state())]
    for device in {p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")}:
        kind: Any = torch.get_device_module(device)
        taken = () if device.type == "mps" else (device,)
        generators += [(kind, taken, kind.get_rng_state(*taken))] if hasattr(kind, "get_rng_state") else []
    return generators


@contextmanager
def same_randomness(module: nn.Module) -> Iterator[None]:
    """Set the random generators back at the end, so that every run draws the numbers of the first."""
    states = generator_states(module)
    try:
        yield
    finally:
        for kind, device, state in states:
            kind.set_rng_state(state, *device)


def choose_layers(model: nn.Module, layers: Iterable[str] | None) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the named layers, or all that have rows, by path; and path → why others stay plain."""
    if isinstance(layers, str):
        raise TypeError(f"layers is the string {layers!r}; pass a list of paths: layers=[{layers!r}].")
    modules = layers_of(model)
    if layers is None:
        owners = {path: module for path, module in modules.items() if trainable(module)}
        left_out = {path: reason for path, module in owners.items() if (reason := _why_left_out(module))}
        return {path: module for path, module in owners.items() if path not in left_out}, left_out
    chosen = list(layers)
    for path in chosen:
        if path not in modules:
            raise no_such_module("layers", path, modules)
    return {path: modules[path] for path in chosen}, {}


def _why_left_out(module: nn.Module) -> str | None:
    if isinstance(module, PLAIN_BY_DEFAULT):
        return f"{type(module).__name__} is left out by default"
    if any(name != "parametrizations" for name, _ in module.named_children()):
        return f"{type(module).__name__} has submodules"
    return None


def mixes_samples(module: nn.Module) -> str:
    """Say that the samples of a module's input have no Jacobian each, or ""."""
    by_batch = isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    return f"{type(module).__name__} mixes the samples of a batch" if by_batch else ""


def batched(layer: nn.Module, inputs: tuple[Tensor, ...], grad_output: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return a call with a dimension for samples, which convolutions and linear layers may be called without."""
    dtype = next(layer.parameters()).dtype  # which inputs within autocast may lack
    inputs = tuple(
        each.to(torch.promote_types(each.dtype, dtype)) if each.is_floating_point() else each for each in inputs
    )
    if isinstance(layer, _ConvNd):
        unbatched = inputs[0].dim() == len(layer.kernel_size) + 1
    else:
        unbatched = isinstance(layer, nn.Linear) and inputs[0].dim() == 1
    return ((inputs[0].unsqueeze(0),), grad_output.unsqueeze(0)) if unbatched else (inputs, grad_output)


def as_rows(layer: nn.Module, tensor: Tensor, parameter_dims: int = 0) -> Tensor:
    """Reshape (samples, *output, *parameter) to (groups, rows, features, parameter size), the last if there is one."""
    output_dims, groups = tensor.dim() - parameter_dims, 1
    if isinstance(layer, _ConvNd):
        groups = layer.groups  # as many layers side by side, each with its rows
        tensor = tensor.movedim(1, output_dims - 1)
    elif output_dims == 1:
        tensor, output_dims = tensor.unsqueeze(1), 2
    if parameter_dims:
        tensor = tensor.flatten(output_dims)
    return tensor.flatten(0, output_dims - 2).unflatten(1, (groups, -1)).movedim(1, 0)
