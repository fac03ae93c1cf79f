"""Replacing a model's layers by structural ones, weights kept."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..attach.checks import bypassed
from ..attach.coverage import warn

Factory = Callable[..., nn.Module]


def _named(*names: str) -> Callable[[Any], dict[str, Any]]:
    """Arguments that a layer keeps as attributes of the same names, and whether it has a bias."""
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

#: What a class is constructed with that replaces a torch layer, read from that layer. For normalisers these are the
#: arguments of `DyT`: nn.LayerNorm's, and the dimension of the channels where it is not the last.
CONSTRUCTOR_ARGUMENTS: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    nn.Linear: _named("in_features", "out_features"),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _named(*_CONV)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _named(*_CONV, "output_padding")),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _batch_norm),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _named("normalized_shape", "elementwise_affine")),
    nn.Tanh: lambda layer: {},
}

#: Buffers that no replacement has a use for; a layer with others is refused.
RUNNING_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


class Replacement(NamedTuple):
    """One layer of a `plan`; as a string, one line.

    Args:
        path: of the old layer in the model, the first one if it stands in several places.
        old: the layer that goes.
        new: the layer that comes, holding what it takes over.
        dropped: the old layer's parameters and buffers that the new one does not hold; copies do not count as held.
        added: parameters of the new layer that are its own; an optimizer that was built before does not hold them.

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
    What is not handed on is dropped, such as a batch norm's running statistics. What is new, such as α of `DyT`, has to
    be given to that optimizer by add_param_group. `plan` lists both. Layers are matched by exact type; one that stands
    in several places is replaced by one. Layers that a module of torch uses without calling them stay, with a warning.

    Args:
        model: the model to change.
        mapping: layer type → what replaces it. A class that takes the old one's constructor arguments
            (`AffineLikeLinear` for nn.Linear, `DyT` for nn.BatchNorm2d), a functools.partial of one that sets others
            (`beta=0.5`), or any other function from the old layer to the new one, whose parameters then are its own
            affair.

    Returns:
        The model, or the new layer if the model itself was replaced.

    Raises:
        TypeError: a class that replaces a type whose constructor arguments are not known here, or that does not
            take them.
        ValueError: no layer was replaced, or a layer to replace has no shape yet, or has hooks, a forward of its own,
            parametrizations, or buffers other than running statistics, which would be lost.

    Example:
        >>> from torch import nn
        >>> from adiv_optim.layers import AffineLikeLinear, ChannelScale, L2Norm, convert
        >>> convert(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), {nn.Linear: AffineLikeLinear})[0]
        AffineLikeLinear(in_features=4, out_features=2, bias=True, alpha=1.0, beta=1.0)

        A normaliser in two parts, which keeps γ and β:

        >>> def l2_norm(old):
        ...     return nn.Sequential(L2Norm(dim=(1, 2, 3)), convert(old, {nn.BatchNorm2d: ChannelScale}))
        >>> convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), {nn.BatchNorm2d: l2_norm})[1]
        Sequential(
          (0): L2Norm(dim=(1, 2, 3), eps=1e-12)
          (1): ChannelScale((8,), dim=1, elementwise_affine=True, bias=True, per_channel=True)
        )
    """
    replaced = {replacement.old: replacement.new for replacement in plan(model, mapping)}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
                if isinstance(parent, nn.TransformerEncoderLayer):
                    # In evaluation its fast path computes torch's own layer from the weights, past any replacement.
                    # This flag is what it asks first.
                    parent.activation_relu_or_gelu = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not all(
            getattr(layer, "activation_relu_or_gelu", 0) for layer in module.layers
        ):
            # With a padding mask it would hand nested tensors on, which only the fast path can read.
            module.use_nested_tensor = False
    return replaced.get(model, model)


def plan(model: nn.Module, mapping: Mapping[type[nn.Module], Factory]) -> list[Replacement]:
    r"""What `convert` would replace, and what would be dropped; the model stays as it is.

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
    if not mapping:
        raise ValueError("the mapping is empty; name a layer type and what replaces it: {nn.LayerNorm: DyT}.")
    for key, factory in mapping.items():
        if not isinstance(key, type) or isinstance(factory, nn.Module) or not callable(factory):
            raise TypeError(
                f"the mapping holds {key!r}: {factory!r}; it takes a layer type to a class or a function from the old "
                "layer to the new one."
            )
    found: list[Replacement] = []
    uncalled, left_alone = bypassed(model), []
    for path, layer in model.named_modules():
        kind = type(layer).__bases__[0] if parametrize.is_parametrized(layer) else type(layer)
        if getattr(kind, "cls_to_become", None) in mapping:
            raise ValueError(
                f"layer {path!r} ({kind.__name__}) has no shape yet; run one batch through the model first, or convert "
                "would leave it as it is."
            )
        if kind in mapping and layer in uncalled:
            left_alone.append(f"layer {path!r} ({uncalled[layer]})")
        elif kind in mapping:
            _refuse_what_would_be_lost(path, layer)
            if above := [other.path for other in found if path.startswith(f"{other.path}." if other.path else "")]:
                raise ValueError(
                    f"layer {path!r} ({kind.__name__}) is a part of {above[0]!r}, which is replaced as well; call "
                    "convert once for each."
                )
            new = _replacement(path, layer, mapping[kind], model)
            if not isinstance(new, nn.Module):
                raise TypeError(
                    f"layer {path!r} ({kind.__name__}): the function returned {new!r}; it has to return a module."
                )
            new.train(layer.training)
            was, held = ({id(tensor) for tensor in _tensors(each).values()} for each in (layer, new))
            dropped = tuple(name for name, tensor in _tensors(layer).items() if id(tensor) not in held)
            added = tuple(name for name, parameter in new.named_parameters() if id(parameter) not in was)
            found.append(Replacement(path, layer, new, dropped, added))
    replaced = {type(replacement.old) for replacement in found}
    if left_alone:
        warn(f"convert left {'; '.join(left_alone)} as it is: another one in its place would change nothing.")
    for kind in mapping if found else ():
        others = {type(each) for each in model.modules() if isinstance(each, kind) and each not in uncalled} - replaced
        if others:
            names = _names(others)
            there = f"found no {kind.__name__} in the model but {names}, left"
            left = f"left {names}" if kind in replaced else there
            warn(f"convert {left} as it is. {_EXACT}")
    if not found:
        wanted, types = ", ".join(kind.__name__ for kind in mapping), _names(map(type, model.modules()))
        raise ValueError(f"convert found no {wanted} in the model; its modules are of type {types}. {_EXACT}")
    return found


_EXACT = (
    "Layers are matched by exact type: name a subclass itself in the mapping; detach(model) first if a correction is "
    "attached."
)


def _names(types: Iterable[type[nn.Module]]) -> str:
    """Class names, those of torch.nn without their module."""
    return ", ".join(
        sorted({t.__name__ if t.__module__.startswith("torch.nn.") else f"{t.__module__}.{t.__name__}" for t in types})
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(chain(module.named_parameters(), module.named_buffers()))


def _replacement(path: str, layer: nn.Module, factory: Factory, model: nn.Module) -> nn.Module:
    cls = factory.func if isinstance(factory, partial) else factory
    if not isinstance(cls, type):
        return factory(layer)
    kind = type(layer).__name__
    remedy = f"pass a function instead of the class: {{{kind}: lambda old: {cls.__name__}(…)}}."
    if type(layer) not in CONSTRUCTOR_ARGUMENTS:
        raise TypeError(f"convert does not know the constructor arguments of {kind}; {remedy}")
    arguments = CONSTRUCTOR_ARGUMENTS[type(layer)](layer)
    if isinstance(factory, partial):
        arguments = {name: value for name, value in arguments.items() if name not in factory.keywords}
    # Of the device and the dtype that parameters of its own shall have.
    tensors = chain(_tensors(layer).values(), model.parameters())
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
    try:
        # On the meta device nothing is allocated or drawn for parameters that are about to be replaced.
        with torch.device("meta"):
            new = _hand_on(layer, factory(**arguments))
        if any(tensor.is_meta for tensor in _tensors(new).values()):
            # It has parameters of its own as well, which need their values.
            with like.device:
                new = _hand_on(layer, factory(**arguments).to(like.dtype))
    except TypeError as error:
        raise TypeError(
            f"layer {path!r} ({kind}): {cls.__name__} does not take {', '.join(arguments)}: {error}; {remedy}"
        ) from error
    return new


def _hand_on(old: nn.Module, new: nn.Module) -> nn.Module:
    for name, parameter in old._parameters.items():
        own = new._parameters.get(name)
        if parameter is not None and own is not None and own.shape == parameter.shape:
            new.register_parameter(name, parameter)
    return new


def _refuse_what_would_be_lost(path: str, layer: nn.Module) -> None:
    # Every kind that torch has, those of state dicts among them.
    hooks = any(kept for name, kept in vars(layer).items() if name.endswith("_hooks"))
    what = "hooks" if hooks else "buffers" if layer._buffers.keys() - RUNNING_STATISTICS else None
    what = "a forward of its own" if "forward" in vars(layer) else what
    what = "parametrizations" if parametrize.is_parametrized(layer) else what
    if what:
        raise ValueError(
            f"layer {path!r} ({type(layer).__name__}) has {what}, which its replacement would lose; "
            "convert the model first and add them afterwards."
        )
