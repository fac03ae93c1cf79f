"""Replacing a model's layers by structural ones, weights kept."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn
from torch.nn.utils import parametrize

#: The constructor arguments of each torch layer that a structural layer can replace by its class alone.
CONSTRUCTOR_ARGUMENTS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
}


def convert(model: nn.Module, mapping: Mapping[type[nn.Module], Callable[..., nn.Module]]) -> nn.Module:
    """Replace layers by type, in place, and hand their parameters on to the new layers.

    The new layers hold the very Parameter objects of the old ones: the state dict keeps its keys and an
    optimizer built before goes on working. Layers are matched by exact type; one that stands in several
    places is replaced by one.

    Args:
        model: the model to change.
        mapping: layer type → what replaces it. A class that takes the old one's constructor arguments
            (`AffineLikeLinear` for nn.Linear), a functools.partial of one that sets others (`beta=0.5`), or
            any other function from the old layer to the new one, whose parameters then are its own affair.

    Returns:
        The model, or the new layer if the model itself was replaced.

    Raises:
        TypeError: a class that replaces a type whose constructor arguments are not known here.
        ValueError: no layer was replaced, or a layer to replace has hooks, buffers or parametrizations, which
            would be lost.

    Example:
        >>> from torch import nn
        >>> from adiv_optim.layers import AffineLikeLinear, convert
        >>> convert(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), {nn.Linear: AffineLikeLinear})[0]
        AffineLikeLinear(in_features=4, out_features=2, bias=True, alpha=1.0, beta=1.0)
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for path, layer in model.named_modules():
        kind = type(layer).__bases__[0] if parametrize.is_parametrized(layer) else type(layer)
        if kind in mapping:
            _refuse_what_would_be_lost(path, layer)
            replaced[layer] = _replacement(layer, mapping[kind])
    if not replaced:
        found = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        wanted = ", ".join(kind.__name__ for kind in mapping)
        raise ValueError(
            f"convert found no {wanted} in the model; its modules are of type {found}. Layers are matched by exact "
            "type: detach(model) first if a correction is attached."
        )
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
                if isinstance(parent, nn.TransformerEncoderLayer):
                    # In evaluation its fast path computes torch's own layer from the weights, past any replacement.
                    # This flag is what it asks first.
                    parent.activation_relu_or_gelu = 0
    return replaced.get(model, model)


def _replacement(layer: nn.Module, factory: Callable[..., nn.Module]) -> nn.Module:
    cls = factory.func if isinstance(factory, partial) else factory
    if not isinstance(cls, type):
        return factory(layer).train(layer.training)
    if type(layer) not in CONSTRUCTOR_ARGUMENTS:
        raise TypeError(
            f"convert does not know the constructor arguments of {type(layer).__name__}; instead of the class "
            f"{cls.__name__} pass a function: {{{type(layer).__name__}: lambda old: {cls.__name__}(…)}}."
        )
    arguments = {name: getattr(layer, name) for name in CONSTRUCTOR_ARGUMENTS[type(layer)]}
    # On the meta device nothing is allocated or drawn for parameters that are about to be replaced.
    new = factory(**arguments, bias=layer.bias is not None, device="meta")
    for name, parameter in layer._parameters.items():
        new.register_parameter(name, parameter)
    return new.train(layer.training)


def _refuse_what_would_be_lost(path: str, layer: nn.Module) -> None:
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    what = "hooks" if any(hooks) else "buffers" if layer._buffers else None
    what = "parametrizations" if parametrize.is_parametrized(layer) else what
    if what:
        raise ValueError(
            f"layer {path!r} ({type(layer).__name__}) has {what}, which its replacement would lose; "
            "convert the model first and add them afterwards."
        )
