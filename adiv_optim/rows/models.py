"""Layers within a model: paths, those that `skip` names or that are never called; refusals of lazy and sharded ones."""

from collections.abc import Collection, Container, Iterable, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from .._device import address, local
from .layers import Corrected, plain_type

#: Modules of torch.nn, where this version has them, that use the weights of a layer below them without calling it.
_BYPASSING: tuple[type[nn.Module], ...] = tuple(
    getattr(nn, name) for name in ("MultiheadAttention", "LinearCrossEntropyLoss") if hasattr(nn, name)
)
#: Paths of modules, each with all below it, and module types.
Skip = Iterable[str | type[nn.Module]]
#: Why parameters of skipped modules take the plain step.
NAMED = "named in skip"
#: How the reason begins for a parameter that shares memory with another, and so takes the plain step.
SHARED_MEMORY = "it shares its memory with"
#: The remedy where FSDP1 has flattened parameters.
UNFLATTENED = "use fully_shard, or GradientOnly, which goes with FSDP1"


def label(path: str) -> str:
    """Return the name of a part of a model in messages."""
    return f"layer {path!r}" if path else "the model itself"


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by path, but for those of a parametrization, which are part of a layer."""
    return {path: module for path, module in model.named_modules() if "parametrizations" not in path.split(".")}


def trainable(layer: nn.Module, path: str = "") -> list[tuple[str, nn.Parameter]]:
    """List the trainable parameters of a layer, those of its parametrizations among them, by path."""
    parameters = list(layer.named_parameters(path, recurse=False))
    if parametrize.is_parametrized(layer):
        inside = layer.get_submodule("parametrizations")
        parameters += inside.named_parameters(f"{path}.parametrizations".lstrip("."))
    return [(name, parameter) for name, parameter in parameters if parameter.requires_grad]


def bypassed(model: nn.Module) -> dict[nn.Module, str]:
    """Map layers whose parent uses their weights without calling them to the reason why they stay plain."""
    return {
        layer: f"{plain_type(module).__name__} uses it without calling the layer"
        for module in model.modules()
        if plain_type(module) in _BYPASSING  # exact types alone: a subclass may call its layers
        for layer in module.children()
    }


def named_in_skip(model: nn.Module, skip: Skip, *, may_be_missing: bool = False) -> set[nn.Module]:
    """Return the modules that `skip` names, and all below them.

    Raises:
        TypeError: `skip` is a string.
        ValueError: the model has none of that name, and it is not said that they `may_be_missing`.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip is the string {skip!r}; pass a list of paths or types: skip=[{skip!r}].")
    modules = dict(model.named_modules(remove_duplicate=False))
    skipped: set[nn.Module] = set()
    for entry in skip:
        if isinstance(entry, type):
            roots = [module for module in modules.values() if isinstance(module, entry)]
        else:
            roots = [module for path, module in modules.items() if path == entry]
        if not roots and not may_be_missing:
            raise no_such_module("skip", entry, modules)
        skipped.update(module for root in roots for module in root.modules())
    return skipped


def no_such_module(argument: str, entry: object, paths: Collection[str]) -> ValueError:
    """Return the error for an argument that names none of a model's modules."""
    there = ", ".join(repr(path) for path in [*paths][:20]) + ", …" * (len(paths) > 20)
    return ValueError(f"{argument} names {entry!r}, which the model does not have; its modules are {there}.")


def overlaps(parameters: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """Map the id of each parameter that may share elements with another to why its step is plain.

    Such is a decoder whose `weight.data` is the encoder's, transposed: to map both would map the elements twice. The
    ranges of addresses decide, so that interleaved columns of one matrix count as well.
    """
    spans: list[tuple[torch.device, int, int, str]] = []
    for name, parameter in parameters.items():
        if start := address(parameter):
            part = local(parameter)
            last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            spans.append((part.device, start, start + (last + 1) * part.element_size(), name))
    spans.sort(key=lambda span: (str(span[0]), *span[1:]))
    reasons: dict[int, str] = {}
    farthest = spans[0] if spans else None
    for span in spans[1:]:
        assert farthest is not None
        if span[0] == farthest[0] and span[1] < farthest[2]:
            for name, other in ((span[3], farthest[3]), (farthest[3], span[3])):
                reasons.setdefault(id(parameters[name]), f"{SHARED_MEMORY} {other}")
        if span[0] != farthest[0] or span[2] > farthest[2]:
            farthest = span
    return reasons


def refuse_lazy(where: str, model: nn.Module, skipped: Container[nn.Module] = ()) -> None:
    """Raise a ValueError if a parameter of the model has no shape yet."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter) and module not in skipped:
                raise ValueError(
                    f"{where}: {name!r} of {label(path)} ({type(module).__name__}) has no shape yet; run one batch "
                    "through the model first."
                )


def refuse_attached(where: str, model: nn.Module, remedy: str) -> None:
    """Raise a ValueError if a layer of `model` has a correction."""
    attached = [path for path, module in model.named_modules() if isinstance(module, Corrected)]
    if attached:
        raise ValueError(
            f"{where}: {label(attached[0])} already has a correction ({len(attached)} layers have); {remedy}."
        )


def refuse_sharded(caller: str, model: nn.Module, remedy: str, *, only_flat: bool = False) -> None:
    """Raise a ValueError if a part of `model` is sharded, so that no process has all of its weights.

    `only_flat` is for callers that work on rows: it refuses only parameters that FSDP1 has flattened.
    """
    for path, module in model.named_modules():
        flat = type(module).__name__ == "FullyShardedDataParallel"
        if flat or (not only_flat and any(hasattr(p, "device_mesh") for p in module.parameters(recurse=False))):
            where, how = f"module {path!r}" if path else "the model", "flat" if flat else "DTensor"
            raise ValueError(f"{caller}: {where} has sharded parameters ({how}), which no process holds; {remedy}.")
