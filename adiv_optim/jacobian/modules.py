"""Modules as pure functions, products with their Jacobians, the layers of a model that have rows, and their calls."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

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

    The arguments are copied, as the module may work in place. A module at two paths gets its tensors
    once: torch's functional_call would treat it as two modules, and leave plain tensors in it.
    """
    first: dict[Tensor, str] = {}
    values = {}
    for path, part in module.named_modules():
        of_part = (part.named_parameters, part.named_buffers)
        for name, tensor in chain.from_iterable(each(path, False, remove_duplicate=False) for each in of_part):
            shared = first.setdefault(tensor, name)
            if shared in tensors:
                values[name] = tensors[shared]
    return functional_call(module, values, tuple(map(_copied, arguments)), tie_weights=False)


def jvp(function: Callable[[Parts], Tensor], at: Parts, tangent: Parts) -> Tensor:
    """Return J · tangent, as the derivative of Jᵀu by u: torch lacks forward-mode rules for some operations."""
    output, pull = vjp(function, at)[:2]
    return vjp(lambda cotangent: pull(cotangent)[0], torch.zeros_like(output))[1](tangent)[0]


def generator_states(module: nn.Module) -> list[tuple[Any, tuple[torch.device, ...], Tensor]]:
    """List the random generators that a module may draw from: torch's module, the device its functions take, the state.

    torch.random.fork_rng does not know MPS, which has one device, and functions that take none.
    """
    devices = {p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")}
    kinds: list[tuple[Any, tuple[torch.device, ...]]] = [(torch, ())]
    kinds += [(torch.get_device_module(each), () if each.type == "mps" else (each,)) for each in devices]
    return [(kind, taken, kind.get_rng_state(*taken)) for kind, taken in kinds if hasattr(kind, "get_rng_state")]


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


def why_mixed(module: nn.Module) -> str:
    """Return why samples of a module's input have no Jacobians of their own, or ""."""
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


class Call(NamedTuple):
    """The inputs of a layer's call, as they were then, and dL/dz of its output."""

    inputs: tuple[Tensor, ...]
    grad_output: Tensor


class Pass(NamedTuple):
    """One forward and backward."""

    loss: Tensor  # detached
    gradients: dict[str, Tensor]  # parameter path → gradient, where the loss depends on it; none shares memory
    calls: dict[str, list[Call]]  # layer path → its calls on which the loss depends
    refused: dict[str, str]  # layer path → why a call of it has no rows


def _random_states(layer: nn.Module) -> list[Tensor]:
    return [state for *_, state in generator_states(layer)]


def _copied(value: Any) -> Any:
    # A model may work on its input in place, which must not change the caller's data.
    return value.clone() if isinstance(value, Tensor) else value


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise ValueError(f"loss_fn returned {kind}; it must return one number, as reduction='mean' does.")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("nothing can be differentiated in torch.inference_mode; call this outside of it.")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any trainable parameter; detach nothing on the way to it.")
    return loss


class _Recording:
    """Hooks that keep the inputs of layers as they were, and their outputs, call by call; see `differentiate`."""

    def __init__(self, layers: dict[str, nn.Module], constant: bool) -> None:
        self.layers, self.constant = layers, constant
        self.calls: list[tuple[str, tuple[Tensor, ...], Tensor]] = []
        self.refused: dict[str, str] = {}
        # Of calls that have not returned: the inputs, and the random generators.
        self._within: dict[str, tuple[tuple[Tensor, ...], list[Tensor]]] = {}
        self._trained = {path: [p for p in each.parameters() if p.requires_grad] for path, each in layers.items()}

    @contextmanager
    def within_hooks(self) -> Iterator[None]:
        with ExitStack() as ends:
            for path, layer in self.layers.items():
                ends.callback(self._train, path, True)
                ends.callback(layer.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True).remove)
                ends.callback(layer.register_forward_hook(partial(self._leave, path)).remove)
            yield

    def _train(self, path: str, mode: bool) -> None:
        for parameter in self._trained[path] if self.constant else ():
            parameter.requires_grad_(mode)

    def _enter(self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args or kwargs or not all(isinstance(arg, Tensor) for arg in args):
            self.refused[path] = "it was not called with tensors alone, by position"
        # A copy: code behind the layer may work in place.
        inputs = tuple(arg.detach().clone() for arg in args if isinstance(arg, Tensor))
        self._train(path, False)
        self._within[path] = inputs, _random_states(layer)

    def _leave(self, path: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor) and not output.requires_grad:
            output = output.detach()  # a view of a parameter would require gradients with it again, and lead nowhere
        self._train(path, True)
        inputs, states = self._within.pop(path)
        if not all(map(torch.equal, states, _random_states(layer))):
            self.refused[path] = "it drew random numbers, which it would draw anew for every row without model.eval()"
        if not isinstance(output, Tensor):
            self.refused[path] = f"it returned {type(output).__name__}; only a layer that returns one tensor has rows"
        elif path not in self.refused and (self.constant or output.requires_grad):
            output = output if output.requires_grad else output.detach().requires_grad_()
            self.calls.append((path, inputs, output))
            return output.clone()  # so that an in-place activation behind the layer leaves the recorded output alone
        return output


def differentiate(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    layers: dict[str, nn.Module],
    *,
    constant: bool = False,
) -> Pass:
    """Run a model forward and backward once, and keep the inputs of layers and the gradients of their outputs.

    With `constant` the parameters of these layers are constants while the layers run, so a shared parameter's gradient
    has only the other modules' part, and a call without rows is an error.
    """
    recording = _Recording(layers, constant)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named = inputs if isinstance(inputs, Mapping) else {}
    arguments = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
    with torch.enable_grad(), recording.within_hooks():
        output = model(*map(_copied, arguments), **{name: _copied(each) for name, each in named.items()})
        for path, reason in recording.refused.items() if constant else ():
            label = f"layer {path!r} ({type(layers[path]).__name__})"
            raise ValueError(f"{label} has no Jacobian: {reason}; leave it out of `layers`.")
        loss = _checked(loss_fn(output, targets))
        recorded = list(recording.calls)
        outputs = [output for *_, output in recorded]
        # Within the hooks: a checkpoint must recompute the same graph.
        computed = torch.autograd.grad(loss, [*outputs, *parameters.values()], allow_unused=True)
    calls: dict[str, list[Call]] = {}
    for (path, read, _), gradient in zip(recorded, computed, strict=False):
        if gradient is not None and path not in recording.refused:
            calls.setdefault(path, []).append(Call(read, gradient))
    # Copies: autograd gives both summands of p + q the same gradient, and those of a sum a view of a single number.
    of_parameters = zip(parameters, computed[len(recorded) :], strict=True)
    gradients = {name: gradient.clone() for name, gradient in of_parameters if gradient is not None}
    return Pass(loss.detach(), gradients, calls, recording.refused)
