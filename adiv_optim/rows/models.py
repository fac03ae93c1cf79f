"""A model's layers and parameters: which are treated, why others are not, and which `skip` names or are refused."""

import inspect
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
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
#: Why a parameter takes the plain step whose layer would be treated, had it run.
UNCALLED = "it has a gradient, but its layer was never called: another module uses its weight"
#: Why parameters of skipped modules take the plain step.
IN_SKIP = "named in skip"
#: Why a parameter takes the plain step that shares memory with another, whose name follows.
SHARED_MEMORY = "it shares its memory with"
#: The remedy where FSDP1 has flattened parameters.
FSDP1_REMEDY = "use fully_shard, or GradientOnly, which goes with FSDP1"


def label(path: str) -> str:
    """Return what messages call the part of a model that stands at a path."""
    return f"layer {path!r}" if path else "the model itself"


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by path, without those of parametrizations, which are parts of a layer."""
    return {path: module for path, module in model.named_modules() if "parametrizations" not in path.split(".")}


def trainable(layer: nn.Module, path: str = "") -> list[tuple[str, nn.Parameter]]:
    """List the trainable parameters of a layer, those of its parametrizations among them, by path."""
    parameters = list(layer.named_parameters(path, recurse=False))
    if parametrize.is_parametrized(layer):
        inside = layer.get_submodule("parametrizations")
        parameters += inside.named_parameters(f"{path}.parametrizations".lstrip("."))
    return [(name, parameter) for name, parameter in parameters if parameter.requires_grad]


def bypassed(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers whose parent uses their weights without calling them, each with the reason to give."""
    return {
        layer: f"{plain_type(module).__name__} uses it without calling the layer"
        for module in model.modules()
        if plain_type(module) in _BYPASSING  # exact types alone: a subclass may call its layers
        for layer in module.children()
    }


def first_argument(layer: nn.Module, kwargs: Collection[str]) -> str:
    """Return which keyword argument is the first of a layer's forward: subclasses name their input as they like."""
    if len(kwargs) == 1:
        return next(iter(kwargs))
    return next(name for name in [*inspect.signature(layer.forward).parameters, *kwargs] if name in kwargs)


def listed(skip: Skip) -> tuple[str | type[nn.Module], ...]:
    """Return the entries of `skip`; a TypeError where it is a single one, or holds modules."""
    entries = tuple(skip) if isinstance(skip, Iterable) and not isinstance(skip, str) else None
    if entries is None or not all(isinstance(entry, (str, type)) for entry in entries):
        raise TypeError(f"skip is {skip!r}; pass a list of paths or types: skip=[…], or [] for none.")
    return entries


def named_in_skip(model: nn.Module, skip: Skip, *, may_be_missing: bool = False) -> set[nn.Module]:
    """Return the modules that `skip` names, and all below them; a ValueError if one is missing, unless it may be."""
    modules = dict(model.named_modules(remove_duplicate=False))
    skipped: set[nn.Module] = set()
    for entry in listed(skip):
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
    modules = ", ".join(repr(path) for path in [*paths][:20]) + ", …" * (len(paths) > 20)
    return ValueError(f"{argument} names {entry!r}, which the model does not have; its modules are {modules}.")


def overlaps(parameters: Mapping[str, Tensor]) -> dict[int, str]:
    """Return the parameters that may share elements with another, by id, each with the reason for its plain step.

    A decoder whose `weight.data` is the encoder's, transposed, is an example: to map both would map the elements twice.
    The ranges of addresses decide, so that interleaved columns of one matrix count as well.
    """
    spans: list[tuple[int, int, str, torch.device]] = []
    for name, parameter in parameters.items():
        if start := address(parameter):
            part = local(parameter)
            last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            spans.append((start, start + (last + 1) * part.element_size(), name, part.device))
    reasons: dict[int, str] = {}
    farthest: dict[torch.device, tuple[int, str]] = {}  # the farthest end so far, and the name of its parameter
    for start, end, name, device in sorted(spans, key=lambda span: span[:3]):
        farthest_end, other = farthest.get(device, (0, ""))
        if farthest_end > start:
            reasons.setdefault(id(parameters[name]), f"{SHARED_MEMORY} {other}")
            reasons.setdefault(id(parameters[other]), f"{SHARED_MEMORY} {name}")
        if farthest_end < end:
            farthest[device] = end, name
    return reasons


def refuse_lazy(caller: str, model: nn.Module, skipped: Container[nn.Module] = ()) -> None:
    """Raise a ValueError if a parameter of the model has no shape yet."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter) and module not in skipped:
                raise ValueError(
                    f"{caller}: {name!r} of {label(path)} ({type(module).__name__}) has no shape yet; run one batch "
                    "through the model first."
                )


def refuse_attached(caller: str, model: nn.Module, remedy: str) -> None:
    """Raise a ValueError if a layer of `model` has a correction."""
    attached = [path for path, module in model.named_modules() if isinstance(module, Corrected)]
    if attached:
        raise ValueError(
            f"{caller}: {label(attached[0])} already has a correction ({len(attached)} layers have); {remedy}."
        )


def refuse_sharded(caller: str, model: nn.Module, remedy: str, *, only_flat: bool = False) -> None:
    """Raise a ValueError if weights of `model` are sharded; with `only_flat`, for work on rows, if FSDP1 does it."""
    for path, module in model.named_modules():
        is_flat = type(module).__name__ == "FullyShardedDataParallel"
        if is_flat or (not only_flat and any(hasattr(p, "device_mesh") for p in module.parameters(recurse=False))):
            kind = "flat" if is_flat else "DTensor"
            raise ValueError(
                f"{caller}: {label(path)} has sharded parameters ({kind}), which no process holds; {remedy}."
            )


@dataclass(frozen=True, repr=False)
class Coverage:
    """Which trainable parameters are treated, and how; printed, the share and a line for each parameter.

    Before any layer has run, none is treated: the printed share is then of those that wait for a step.

    Args:
        treated: path of the parameter → how its gradient or its step is treated.
        skipped: path → why the parameter keeps the plain gradient and step.
        never_seen: path → why it waits: it would be treated, but its layer has not run.
        elements: path → how many numbers the parameter has, for every path above.
    """

    treated: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    never_seen: Mapping[str, str] = field(default_factory=dict)
    elements: Mapping[str, int] = field(default_factory=dict)

    @property
    def parameter_share(self) -> float:
        """The share of parameters that are treated, in [0, 1]; 0 of a model without any."""
        return len(self.treated) / max(1, len(self.elements))

    @property
    def element_share(self) -> float:
        """The share of elements that are in treated parameters, in [0, 1]."""
        return self._element_share(self.treated)

    def _element_share(self, paths: Iterable[str]) -> float:
        return sum(self.elements[path] for path in paths) / max(1, sum(self.elements.values()))

    def reasons(self) -> str:
        """Return the four reasons that skip the most elements, and the share of all elements that each accounts for."""
        sizes: Counter[str] = Counter()
        for path, why in self.skipped.items():
            sizes[why] += self.elements[path]
        total = max(1, sum(self.elements.values()))
        return "; ".join(f"{why} ({size / total:.1%} of the elements)" for why, size in sizes.most_common(4))

    def without_frozen_or_skipped(self) -> "Coverage":
        """Leave out parameters that are frozen or named in skip; those that wait count as treated."""
        left_out = ("frozen", IN_SKIP)
        elements = {path: size for path, size in self.elements.items() if self.skipped.get(path) not in left_out}
        skipped = {path: why for path, why in self.skipped.items() if path in elements}
        return Coverage({**self.treated, **self.never_seen}, skipped, elements=elements)

    def __str__(self) -> str:
        """Return the share, then one line per parameter."""
        state, counted = ("are treated", self.treated)
        if self.never_seen and not self.treated:
            state, counted = ("will be treated after a step that runs their layers", self.never_seen)
        lines = [
            f"{len(counted)} of {len(self.elements)} parameters {state}, "
            f"{self._element_share(counted):.1%} of {sum(self.elements.values()):,} elements"
        ]
        lines += [f"{path}: {how}" for path, how in self.treated.items()]
        lines += [f"{path}: skipped ({why})" for path, why in self.skipped.items()]
        lines += [f"{path}: never seen ({why})" for path, why in self.never_seen.items()]
        return "\n".join(lines)

    __repr__ = __str__  # for notebooks


def describe_uncalled(paths: Sequence[str]) -> str:
    """Return what warnings say of parameters that take the plain step because of `UNCALLED`."""
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return (
        f"{', '.join(paths[:4])}{more}: these have gradients, but their layers were never called. Another module "
        "uses their weights: name the layers in skip. Or torch.compile takes the graph of another model of the same "
        "classes, without hooks: call torch._dynamo.reset() once the wrapper is there."
    )
