"""Putting a correction on a model's layers, and taking it off, by swapping a layer's class.

A swapped layer keeps its parameters, buffers, hooks and state-dict keys; only its forward calls
`adiv_optim.functional`. The classes below can be imported by name, so pickling and copying work.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from .corrections import Correction, check_correction
from .functional._conv import corrected_conv
from .functional._linear import corrected_linear


class _Corrected:
    """What every swapped layer shares; all its state is these entries of the instance's __dict__."""

    _correction: Correction
    _label: str  # for error messages: the layer's path in the model
    _ran: bool  # for `coverage`

    def _note_run(self) -> None:
        # Written and never read here: a read would make torch.compile guard on it and compile twice.
        if torch.is_grad_enabled():
            self._ran = True

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, correction={self._correction!r}"  # type: ignore[misc]


class CorrectedLinear(_Corrected, nn.Linear):
    """nn.Linear through `functional.linear`; made by `attach`, not by hand."""

    def forward(self, input: Tensor) -> Tensor:
        """Return Wx + b; see `functional.linear`."""
        self._note_run()
        return corrected_linear(input, self.weight, self.bias, self._correction, name=self._label)


class _CorrectedConv(_Corrected):
    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._note_run()
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return corrected_conv(
            input, weight, bias, self.stride, padding, self.dilation, self.groups, self._correction,
            name=self._label, dims=len(self.kernel_size),
        )  # fmt: skip


class CorrectedConv1d(_CorrectedConv, nn.Conv1d):
    """nn.Conv1d through `functional.conv1d`; made by `attach`, not by hand."""


class CorrectedConv2d(_CorrectedConv, nn.Conv2d):
    """nn.Conv2d through `functional.conv2d`; made by `attach`, not by hand."""


class CorrectedConv3d(_CorrectedConv, nn.Conv3d):
    """nn.Conv3d through `functional.conv3d`; made by `attach`, not by hand."""


#: What replaces what. Exact types only: a subclass may compute something else in its forward.
CORRECTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: CorrectedLinear,
    nn.Conv1d: CorrectedConv1d,
    nn.Conv2d: CorrectedConv2d,
    nn.Conv3d: CorrectedConv3d,
}
_PLAIN = {corrected: plain for plain, corrected in CORRECTED.items()}


def attach(
    model: nn.Module,
    correction: Correction,
    *,
    skip: Iterable[str | type[nn.Module]] = (),
    strict: bool = False,
) -> nn.Module:
    """Put a correction on every nn.Linear and nn.Conv1d/2d/3d of a model, in place.

    Parametrized layers (weight_norm, spectral_norm, …) are corrected through the parametrization: the
    gradient of the effective weight is corrected before it reaches the parametrization's own parameters.
    What is not corrected (norms, embeddings, subclasses with a forward of their own, the projections of
    nn.MultiheadAttention, which it uses without calling a layer) keeps the plain gradient; `coverage` lists
    it, and `strict=True` refuses it.

    Args:
        model: any module, itself a layer included.
        correction: the rule, shared by all layers.
        skip: paths of modules (each with all below it) and module types to leave alone.
        strict: raise if a trainable parameter would not be corrected and was not skipped.

    Returns:
        The same model.

    Raises:
        TypeError: the correction is no `Correction`.
        ValueError: a layer already has a correction, `skip` names what is not there, there is nothing to
            attach to, or `strict` finds uncorrected parameters. The model is then unchanged.

    Example:
        >>> from torch import nn
        >>> from adiv_optim import Proportional, attach, detach
        >>> model = attach(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), Proportional())
        >>> model[0]
        CorrectedLinear(in_features=2, out_features=3, bias=True, correction=Proportional(eps=1e-12))
        >>> detach(model)[0]
        Linear(in_features=2, out_features=3, bias=True)
    """
    check_correction(correction)
    skipped = _skipped(model, skip)
    attached = [name for name, module in model.named_modules() if isinstance(module, _Corrected)]
    if attached:
        raise ValueError(
            f"{_label(attached[0])} already has a correction ({len(attached)} layers have); "
            "call adiv_optim.detach(model) before attaching another."
        )
    for name, module in model.named_modules():
        if module not in skipped and any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise ValueError(
                f"{_label(name)} is a {type(module).__name__} without a shape yet; run one batch through the "
                "model before attaching a correction."
            )
    layers = {
        name: module
        for name, module in model.named_modules()
        if module not in skipped and _plain_type(module) in CORRECTED and "forward" not in module.__dict__
    }
    if not layers:
        types = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(
            f"nothing to correct: found modules of type {types}; a correction goes on "
            f"{', '.join(plain.__name__ for plain in CORRECTED)} layers that are not skipped."
        )
    if strict:
        _refuse_uncorrected(model, layers, skipped)
    for path, module in layers.items():
        module.__dict__.update(_correction=correction, _label=f"{_label(path)} ({type(module).__name__})", _ran=False)
        module.__class__ = _swapped(type(module), CORRECTED)
    return model


def detach(model: nn.Module) -> nn.Module:
    """Take every correction off a model, in place; classes and attributes are what they were before `attach`.

    Returns:
        The same model. One without corrections is returned as it is.
    """
    for module in model.modules():
        if isinstance(module, _Corrected):
            module.__class__ = _swapped(type(module), _PLAIN)
            del module._correction, module._label, module._ran
    return model


@dataclass(frozen=True)
class Coverage:
    """Which trainable parameters get corrected gradients; printed, a table.

    Args:
        corrected: paths of parameters whose layer ran with its correction.
        skipped: path → why the parameter keeps the plain gradient.
        never_seen: paths of parameters whose layer has a correction but has not run.
    """

    corrected: tuple[str, ...]
    skipped: dict[str, str]
    never_seen: tuple[str, ...]

    def __str__(self) -> str:
        """Return one line per parameter."""
        lines = [f"{name}: corrected" for name in self.corrected]
        lines += [f"{name}: skipped ({reason})" for name, reason in self.skipped.items()]
        lines += [f"{name}: never seen (its layer has not run)" for name in self.never_seen]
        return "\n".join(lines)


def coverage(model: nn.Module) -> Coverage:
    """List, after a backward, each trainable parameter as corrected, skipped or never seen.

    A parameter that two modules share is listed once, as corrected if one of them is a corrected layer that
    ran; the part of its gradient that comes from the other module stays plain.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from adiv_optim import Proportional, attach, coverage
        >>> model = attach(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), Proportional())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> print(coverage(model))
        0.weight: corrected
        0.bias: corrected
        1.weight: skipped (LayerNorm has no correction)
        1.bias: skipped (LayerNorm has no correction)
    """
    corrected: dict[int, str] = {}
    never_seen: dict[int, str] = {}
    skipped: dict[int, tuple[str, str]] = {}
    for path, parameter, owner in _trainable(model):
        if isinstance(owner, _Corrected):
            (corrected if owner._ran else never_seen).setdefault(id(parameter), path)
        else:
            skipped.setdefault(id(parameter), (path, _why_plain(model, path, owner)))
    return Coverage(
        corrected=tuple(corrected.values()),
        skipped=dict(entry for key, entry in skipped.items() if key not in corrected),
        never_seen=tuple(path for key, path in never_seen.items() if key not in corrected),
    )


def _plain_type(module: nn.Module) -> type:
    """The module's type, seen through the class that torch's parametrize puts over it."""
    return type(module).__bases__[0] if parametrize.is_parametrized(module) else type(module)


def _swapped(cls: type, replacement: dict[type[nn.Module], type[nn.Module]]) -> type:
    """The class that stands for `cls` after the swap.

    torch's parametrize gives each module a class of its own, made on the spot over the layer's. Such a
    class is made anew over the replacement, and remembers the one it stands for so that undoing is exact.
    """
    if cls in replacement:
        return replacement[cls]
    if "_adiv_stands_for" in cls.__dict__:
        stands_for: type = cls.__dict__["_adiv_stands_for"]
        return stands_for
    namespace = {key: value for key, value in cls.__dict__.items() if key not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (replacement[cls.__bases__[0]],), {**namespace, "_adiv_stands_for": cls})


def _skipped(model: nn.Module, skip: Iterable[str | type[nn.Module]]) -> set[nn.Module]:
    if isinstance(skip, str):
        raise TypeError(f"skip is the string {skip!r}; pass a list of paths or types: skip=[{skip!r}].")
    modules = dict(model.named_modules(remove_duplicate=False))
    skipped: set[nn.Module] = set()
    for entry in skip:
        if isinstance(entry, type):
            roots = [module for module in modules.values() if isinstance(module, entry)]
        else:
            roots = [modules[entry]] if entry in modules else []
        if not roots:
            raise ValueError(
                f"skip names {entry!r}, which the model does not have; its modules are "
                f"{', '.join(repr(name) for name in list(modules)[:20])}{', …' if len(modules) > 20 else ''}."
            )
        for root in roots:
            skipped.update(root.modules())
    return skipped


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter, nn.Module]]:
    """(path, parameter, layer that owns it), where a parametrization's parameters belong to its layer."""
    found = []
    for path, module in model.named_modules():
        if "parametrizations" in path.split("."):
            continue
        own = dict(module.named_parameters(prefix=path, recurse=False))
        if parametrize.is_parametrized(module):
            parametrizations = module.get_submodule("parametrizations")
            own.update(parametrizations.named_parameters(prefix=f"{path}.parametrizations".lstrip(".")))
        found += [(name, parameter, module) for name, parameter in own.items() if parameter.requires_grad]
    return found


def _why_plain(model: nn.Module, path: str, owner: nn.Module) -> str:
    parent_path = path.rpartition(".")[0].rpartition(".")[0]
    parent = model.get_submodule(parent_path)
    if isinstance(parent, nn.MultiheadAttention):
        return f"{type(parent).__name__} uses its {path.removeprefix(parent_path + '.')} without calling the layer"
    if isinstance(owner, nn.MultiheadAttention):
        return f"{type(owner).__name__} has no correction"
    plain = _plain_type(owner)
    if "forward" in owner.__dict__:
        return f"this {plain.__name__} has a forward of its own set on it"
    if plain in CORRECTED:
        return "no correction attached"
    base = next((base for base in CORRECTED if issubclass(plain, base)), None)
    if base is not None:
        return f"{plain.__name__} is a subclass of {base.__name__}, whose forward may differ"
    return f"{plain.__name__} has no correction"


def _refuse_uncorrected(model: nn.Module, layers: dict[str, nn.Module], skipped: set[nn.Module]) -> None:
    corrected = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    missed = [
        f"{path} ({_why_plain(model, path, owner)})"
        for path, parameter, owner in _trainable(model)
        if id(parameter) not in corrected and owner not in skipped
    ]
    if missed:
        raise ValueError(
            f"strict: {len(missed)} trainable parameters would keep the plain gradient: {'; '.join(missed)}. "
            "Name their modules in skip, or pass strict=False."
        )


def _label(path: str) -> str:
    return f"layer {path!r}" if path else "the model itself"
