"""Replacing a model's layers by structural ones, weights kept."""

from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import warn
from ..rows.layers import type_name
from ..rows.models import bypassed, label, refuse_lazy

Factory = Callable[..., nn.Module]


def _named(*names: str) -> Callable[[Any], dict[str, Any]]:
    """Read arguments from attributes of the same names, and whether the layer has a bias."""
    return lambda layer: {
        **{name: getattr(layer, name) for name in names},
        "bias": getattr(layer, "bias", None) is not None,
    }


def _batch_norm(layer: Any) -> dict[str, Any]:
    bias = layer.bias is not None
    return {"normalized_shape": layer.num_features, "dim": 1, "elementwise_affine": layer.affine, "bias": bias}


_CONV = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode",
)  # fmt: skip

#: Torch layer → the arguments that the class in its place is constructed with. For normalisers these are the arguments
#: of `DyT`: nn.LayerNorm's, and the dimension of the channels where it is not the last.
CONSTRUCTOR_ARGUMENTS: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    nn.Linear: _named("in_features", "out_features"),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _named(*_CONV)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _named(*_CONV, "output_padding")),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _batch_norm),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _named("normalized_shape", "elementwise_affine")),
    nn.Tanh: lambda layer: {},
}

#: Buffers that no replacement needs; a layer with others is refused.
_RUNNING_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


class Replacement(NamedTuple):
    """One layer of a `plan`; as a string, one line.

    Args:
        path: of the old layer in the model, the first one if it stands in several places.
        old: the layer that is replaced.
        new: the layer in its place, with the parameters that it takes over.
        dropped: the old layer's parameters and buffers that the new one does not hold.
        added: parameters that only the new layer has; an optimizer that was built before does not train them.

    Example:
        >>> from torch import nn
        >>> from adiv_optim.layers import plan
        >>> (replacement,) = plan(nn.LayerNorm(8), {nn.LayerNorm: lambda old: nn.Identity()})
        >>> replacement.dropped
        ('weight', 'bias')
    """

    path: str
    old: nn.Module
    new: nn.Module
    dropped: tuple[str, ...]
    added: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.path or 'the model'}: {type(self.old).__name__} → {type(self.new).__name__}"]
        parts += [f"drops {', '.join(self.dropped)}"] * bool(self.dropped)
        return ", ".join(parts + [f"adds {', '.join(self.added)}"] * bool(self.added))


def convert(model: nn.Module, mapping: Mapping[type[nn.Module], Factory]) -> nn.Module:
    """Replace layers by type, in place, and hand their parameters on to the new layers.

    The new layers hold the very Parameter objects of the old ones, where both have one of that name and shape: an
    optimizer built before goes on working, and between linear layers or convolutions the state dict keeps its keys.
    All others are dropped, such as a batch norm's running statistics. New parameters, such as α of `DyT`, have to
    be given to that optimizer by add_param_group. `plan` lists both. Layers are matched by exact type; one that stands
    in several places is replaced by one. One that a module of torch uses without calling it stays, with a warning. A
    class is constructed as ever, and may draw random numbers for parameters that are replaced at once.

    Args:
        model: the model to change.
        mapping: layer type → its replacement. A class that takes the old one's constructor arguments
            (`AffineLikeLinear` for nn.Linear, `DyT` for nn.BatchNorm2d), a functools.partial of one that sets others
            (`beta=0.5`), or any other function from the old layer to the new one, which handles parameters itself.

    Returns:
        The model, or the new layer if the model itself was replaced.

    Raises:
        TypeError: not a mapping, a function that returns no module, or a class that replaces a type whose
            constructor arguments are not known here, or that does not take them.
        ValueError: the mapping is empty, no layer was replaced, the model has a lazy parameter, or a layer to replace
            has another one inside, hooks, a forward of its own, or buffers that would be lost.

    Warns:
        UserWarning: layers stay that a module uses without calling them, or that are of a subclass, as corrected and
            parametrized ones are.

    Example:
        >>> from torch import nn
        >>> from adiv_optim.layers import AffineLikeLinear, convert
        >>> convert(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), {nn.Linear: AffineLikeLinear})[0]
        AffineLikeLinear(in_features=4, out_features=2, bias=True, alpha=1.0, beta=1.0)
    """
    replaced = {replacement.old: replacement.new for replacement in plan(model, mapping)}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    new = set(replaced.values())
    for module in model.modules():
        # In evaluation torch's fast path computes the layers from their weights, past any replacement, and hands nested
        # tensors on, which only it can read.
        if isinstance(module, nn.TransformerEncoderLayer) and not new.isdisjoint(module.modules()):
            module.activation_relu_or_gelu = 0  # checked before it reads norm1.eps
        if isinstance(module, nn.TransformerEncoder) and not new.isdisjoint(module.modules()):
            module.use_nested_tensor = False
    return replaced.get(model, model)


def plan(model: nn.Module, mapping: Mapping[type[nn.Module], Factory]) -> list[Replacement]:
    r"""List the layers that `convert` would replace, and the parameters that it would drop; the model stays.

    Args:
        model: as for `convert`.
        mapping: as for `convert`; its functions are called.

    Returns:
        One `Replacement` per layer, in the model's order.

    Raises:
        TypeError, ValueError: as `convert`.

    Example:
        >>> from torch import nn
        >>> from adiv_optim.layers import DyT, plan
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> print(*plan(model, {nn.BatchNorm2d: DyT}), sep="\n")
        1: BatchNorm2d → DyT, drops running_mean, running_var, num_batches_tracked, adds alpha
    """
    _check_mapping(mapping)
    refuse_lazy("convert", model)
    uncalled, modules = bypassed(model), dict(model.named_modules())
    matching = {path: layer for path, layer in modules.items() if type(layer) in mapping}
    chosen = {path: layer for path, layer in matching.items() if layer not in uncalled}
    kept = [f"{label(path)} ({uncalled[layer]})" for path, layer in matching.items() if layer in uncalled]
    if not chosen:
        wanted, types = ", ".join(kind.__name__ for kind in mapping), ", ".join(_types(modules.values()))
        left = f" but {', '.join(kept)}" * bool(kept)
        raise ValueError(
            f"convert found no {wanted} in the model{left}; its modules are of type {types}. {_EXACT_TYPES}"
        )
    compiled = [getattr(module, "_orig_mod", None) for module in modules.values()]  # which goes on calling it
    for path, layer in chosen.items():
        _refuse_lossy(path, layer, chosen, compiled)
    replacements = [_replacement(path, layer, mapping[type(layer)], model) for path, layer in chosen.items()]
    others = [layer for path, layer in modules.items() if path not in matching and layer not in uncalled]
    if kept := kept + _types(layer for layer in others if issubclass(type(layer), tuple(mapping))):
        warn(f"convert left {', '.join(kept)} as it is. {_EXACT_TYPES}")
    return replacements


def _check_mapping(mapping: Mapping[type[nn.Module], Factory]) -> None:
    if not isinstance(mapping, Mapping):
        raise TypeError(f"the mapping is {mapping!r}; it maps layer types to replacements: {{nn.LayerNorm: DyT}}.")
    if not mapping:
        raise ValueError("the mapping is empty; name a layer type and its replacement: {nn.LayerNorm: DyT}.")
    for key, factory in mapping.items():
        if not isinstance(key, type) or isinstance(factory, nn.Module) or not callable(factory):
            raise TypeError(
                f"the mapping holds {key!r}: {factory!r}; it maps a layer type to a class or a function from the old "
                "layer to the new one."
            )


def _refuse_lossy(path: str, layer: nn.Module, chosen: Mapping[str, nn.Module], compiled: Container[Any]) -> None:
    """Raise a ValueError if a layer has what its replacement would not."""
    has = {
        "a forward of its own": "forward" in vars(layer),
        # Every kind that torch has, those of state dicts among them.
        "hooks": any(hooks for name, hooks in vars(layer).items() if name.endswith("_hooks")),
        "buffers": bool(layer._buffers.keys() - _RUNNING_STATISTICS),
        "torch.compile around it": layer in compiled,
        "a layer to replace in it": any(inner in chosen.values() for inner in layer.modules() if inner is not layer),
    }
    if lost := [part for part, is_there in has.items() if is_there]:
        raise ValueError(
            f"{label(path)} ({type(layer).__name__}) has {lost[0]}, which its replacement would lose; call convert "
            "before you add that, or once for each layer."
        )


_EXACT_TYPES = (
    "Layers are matched by exact type: name a subclass itself in the mapping; take corrections, by detach(model), and "
    "parametrizations off first."
)


def _types(layers: Iterable[nn.Module]) -> list[str]:
    return sorted({type_name(type(layer)) for layer in layers})


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(chain(module.named_parameters(), module.named_buffers()))


def _replacement(path: str, layer: nn.Module, factory: Factory, model: nn.Module) -> Replacement:
    """Build the replacement of a layer, and list the parameters that it drops and adds."""
    constructor = factory.func if isinstance(factory, partial) else factory
    new = _construct(path, layer, factory, model) if isinstance(constructor, type) else factory(layer)
    if not isinstance(new, nn.Module):
        kind = type(layer).__name__
        raise TypeError(f"{label(path)} ({kind}): the function returned {new!r}; it has to return a module.")
    new.train(layer.training)
    old_ids, new_ids = ({id(tensor) for tensor in _tensors(module).values()} for module in (layer, new))
    dropped = tuple(name for name, tensor in _tensors(layer).items() if id(tensor) not in new_ids)
    added = tuple(name for name, parameter in new.named_parameters() if id(parameter) not in old_ids)
    return Replacement(path, layer, new, dropped, added)


def _construct(path: str, layer: nn.Module, factory: Any, model: nn.Module) -> nn.Module:
    """Call a class, or a partial of one, with the old layer's arguments, and hand the parameters over."""
    kind, name = type(layer).__name__, getattr(factory, "func", factory).__name__
    remedy = f"pass a function instead of the class: {{{kind}: lambda old: {name}(…)}}."
    if type(layer) not in CONSTRUCTOR_ARGUMENTS:
        raise TypeError(f"convert does not know the constructor arguments of {kind}; {remedy}")
    arguments = {**CONSTRUCTOR_ARGUMENTS[type(layer)](layer), **getattr(factory, "keywords", {})}
    # Parameters that the old layer does not have get this tensor's device and dtype.
    tensors = chain(_tensors(layer).values(), model.parameters())
    template = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
    try:
        with template.device:
            new: nn.Module = factory(**arguments).to(template.dtype)
    except TypeError as error:
        raise TypeError(
            f"{label(path)} ({kind}): {name} cannot take {', '.join(arguments) or 'no arguments'}: {error}; {remedy}"
        ) from error
    for own, parameter in layer._parameters.items():
        replaced = new._parameters.get(own)
        if parameter is not None and replaced is not None and replaced.shape == parameter.shape:
            new.register_parameter(own, parameter)
    return new
