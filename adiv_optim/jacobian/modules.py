"""Modules as functions of their parameters, norms and random numbers made fit for it; and layers with rows."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from ..rows.models import layers_of, no_such_module, overlaps, trainable

#: Path → tensor: parameters, or a direction in their space.
Parameters = dict[str, Tensor]
#: The remedy where a module's Jacobian is wanted and a correction has changed its backward.
DETACH_FIRST = "its backward is not its derivative. Call adiv_optim.detach(model) first"

#: Layers of torch.nn that keep the plain gradient unless they are named; `attach` leaves them alone too.
#: Those that mix samples are refused even then, and recurrent layers, which return a tuple.
PLAIN_BY_DEFAULT: tuple[type[nn.Module], ...] = (
    _NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Embedding, nn.EmbeddingBag, nn.PReLU, nn.RNNBase,
)  # fmt: skip


def pure(module: nn.Module) -> tuple[Parameters, Callable[..., Any]]:
    """Return the trained parameters, and the module as a function of them and its arguments, without side effects."""
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return trained, partial(call_with, module)


def refuse_overlaps(caller: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise a ValueError if trained parameters share memory: a step would count its elements twice."""
    why = overlaps({name: parameter for name, parameter in parameters.items() if parameter.requires_grad})
    if shared := [f"{name!r}: {why[id(p)]}" for name, p in parameters.items() if id(p) in why]:
        raise ValueError(f"{caller}: {shared[0]}, and would be stepped on twice; tie them as one nn.Parameter.")


def call_with(module: nn.Module, parameters: Parameters, *arguments: Any) -> Any:
    """Call a module, on copies of its arguments and buffers, with some tensors in place of the parameters they name.

    A tensor takes the place of a shared parameter wherever that is used. Each use is named here, and tie_weights off:
    else torch's functional_call would treat a module at two paths as two modules, and leave plain tensors in it.
    """
    tensors = parameters | {name: buffer.clone() for name, buffer in module.named_buffers()}
    first_names: dict[Tensor, str] = {}
    values = {}
    for path, part in module.named_modules():
        named = part.named_parameters(path, recurse=False, remove_duplicate=False)
        buffers = part.named_buffers(path, recurse=False, remove_duplicate=False)
        for name, tensor in chain(named, buffers):
            first_name = first_names.setdefault(tensor, name)
            if first_name in tensors:
                values[name] = tensors[first_name]
    if isinstance(module, (nn.RNNCell, nn.GRUCell)) and len(arguments) == 1:  # torch's own zeros do not go under vmap
        arguments += (arguments[0].new_zeros(*arguments[0].shape[:-1], module.hidden_size),)
    return functional_call(module, values, tuple(map(copied, arguments)), tie_weights=False)


class WrittenOut(TorchFunctionMode):
    """Compute layer and instance normalisation, SiLU, Mish, PReLU and cdist by simpler functions, within a with.

    torch's forward rules of the two norms hold the statistics fixed in second derivatives, which are wrong then; those
    of SiLU and Mish are missing where gradients are off. Its backward rules of PReLU and cdist are wrong under vmap.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _WRITTEN_OUT.get(func, func)(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(dims, keepdim=True)
    output = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    output = output if weight is None else output * weight
    return output if bias is None else output + bias


def _instance_norm(
    input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    by_channel = (-1, *(1,) * (input.dim() - 2))
    weight, bias = (None if each is None else each.view(by_channel) for each in (weight, bias))
    return _layer_norm(input, input.shape[2:], weight, bias, eps)


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    output = input * input.sigmoid()
    return input.copy_(output) if inplace else output


def _mish(input: Tensor, inplace: bool = False) -> Tensor:
    output = input * F.softplus(input).tanh()
    return input.copy_(output) if inplace else output


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    if weight.numel() > 1 and input.dim() > 1:
        weight = weight.view(-1, *(1,) * (input.dim() - 2))
    return torch.where(input > 0, input, weight * input)


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, dim=-1)


_WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm, torch.layer_norm: _layer_norm, F.instance_norm: _instance_norm,
    F.silu: _silu, F.mish: _mish, F.prelu: _prelu, torch.prelu: _prelu, torch.cdist: _cdist,
}  # fmt: skip


def copied(argument: Any) -> Any:
    """Return a copy of a tensor, which a module may change in place, and anything else as it is."""
    return argument.clone() if isinstance(argument, Tensor) else argument


def jvp(function: Callable[[Parameters], Tensor], at: Parameters, tangent: Parameters) -> Tensor:
    """Return J · tangent, as the derivative of Jᵀu by u: torch lacks forward-mode rules for some operations."""
    output, pull_back = vjp(function, at)[:2]
    return vjp(lambda cotangent: pull_back(cotangent)[0], torch.zeros_like(output))[1](tangent)[0]


def generator_states(module: nn.Module) -> list[tuple[Any, tuple[torch.device, ...], Tensor]]:
    """List the random generators that a module may draw from: torch's module, the device its functions take, the state.

    torch.random.fork_rng does not know MPS, which has one device, and functions that take none.
    """
    devices = {p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")}
    generators: list[tuple[Any, tuple[torch.device, ...]]] = [(torch, ())]
    generators += [(torch.get_device_module(each), () if each.type == "mps" else (each,)) for each in devices]
    return [(api, device, api.get_rng_state(*device)) for api, device in generators if hasattr(api, "get_rng_state")]


@contextmanager
def same_randomness(module: nn.Module) -> Iterator[None]:
    """Set the random generators back at the end, so that every run draws the numbers of the first."""
    states = generator_states(module)
    try:
        yield
    finally:
        for api, device, state in states:
            api.set_rng_state(state, *device)


def choose_layers(model: nn.Module, layers: Iterable[str] | None) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return path → layer of the layers named, or of all that have rows; and path → why another stays plain."""
    if isinstance(layers, str):
        raise TypeError(f"layers is the string {layers!r}; pass a list of paths: layers=[{layers!r}].")
    modules = layers_of(model)
    if layers is None:
        owners = {path: module for path, module in modules.items() if trainable(module)}
        left_out = {path: reason for path, module in owners.items() if (reason := _why_left_out(module))}
        return {path: module for path, module in owners.items() if path not in left_out}, left_out
    chosen, first_paths = dict[str, nn.Module](), {module: path for path, module in modules.items()}
    every = dict(model.named_modules(remove_duplicate=False))  # a shared one stands at several
    for path in layers:
        module = every.get(path)
        if module not in first_paths:
            raise no_such_module("layers", path, modules)
        chosen[first_paths[module]] = module
    return chosen, {}


def _why_left_out(module: nn.Module) -> str | None:
    if isinstance(module, PLAIN_BY_DEFAULT):
        return f"{type(module).__name__} is left out by default"
    if any(name != "parametrizations" for name, _ in module.named_children()):
        return f"{type(module).__name__} has submodules"
    is_complex = any(parameter.is_complex() for parameter in module.parameters())
    return "it computes with complex numbers, whose rows are not measured" if is_complex else None


def why_mixed(*modules: nn.Module) -> str | None:
    """Return why the samples of an input of these modules have no Jacobian each, if so."""
    for module in modules:
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            return f"{type(module).__name__} mixes the samples of a batch"
    return None


def batched(layer: nn.Module, inputs: tuple[Tensor, ...], grad_output: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return a call in the layer's precision at least, and with a dimension for samples.

    Within autocast inputs may have less precision; convolutions and linear layers may be called without that dimension.
    """
    dtype = next(layer.parameters()).dtype
    inputs = tuple(
        each.to(torch.promote_types(each.dtype, dtype)) if each.is_floating_point() else each for each in inputs
    )
    kernel = layer.kernel_size if isinstance(layer, _ConvNd) else ()
    unbatched = isinstance(layer, (nn.Linear, _ConvNd)) and inputs[0].dim() == len(kernel) + 1
    return ((inputs[0].unsqueeze(0),), grad_output.unsqueeze(0)) if unbatched else (inputs, grad_output)


def as_rows(layer: nn.Module, tensor: Tensor, parameter: Sequence[int] | None = None) -> Tensor:
    """Reshape (samples, *output, *parameter) to (groups, rows, features, parameter size), the last if there is one."""
    output_dims, groups = tensor.dim() - len(parameter or ()), 1
    if isinstance(layer, _ConvNd):
        groups = layer.groups  # as many layers side by side, each with its rows
        tensor = tensor.movedim(1, output_dims - 1)
    elif output_dims == 1:
        tensor, output_dims = tensor.unsqueeze(1), 2
    if parameter is not None:
        tensor = tensor.reshape(*tensor.shape[:output_dims], math.prod(parameter))
    return tensor.flatten(0, output_dims - 2).unflatten(1, (groups, -1)).movedim(1, 0)
