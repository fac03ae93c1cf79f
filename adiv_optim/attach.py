"""Put a correction on a model's layers, and take it off, by swapping their classes.

Parameters, buffers, hooks and state-dict keys stay; the forward is that of `adiv_optim.functional`.
"""

from collections.abc import Container, Iterable, Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._checks import warn
from ._distributed import has_others
from .corrections import Correction, check_correction
from .rows.layers import CORRECTED, PLAIN, Corrected, type_name, why_unknown_rows
from .rows.models import (
    UNCALLED,
    Coverage,
    Skip,
    bypassed,
    label,
    layers_of,
    named_in_skip,
    refuse_attached,
    refuse_lazy,
    trainable,
)


def attach(model: nn.Module, correction: Correction, *, skip: Skip = (), strict: bool = False) -> nn.Module:
    """Put a correction on every nn.Linear, nn.Conv1d/2d/3d and Conv1D of transformers in a model, and return the model.

    It goes on layers of other packages too, after `rows.register`. Of parametrized layers (weight_norm, …) the gradient
    of the effective weight is corrected, before it reaches the parametrization's own parameters. All other modules
    (norms, embeddings, complex layers, subclasses of these layers, the layers that nn.MultiheadAttention and
    nn.LinearCrossEntropyLoss use without calling them) keep the plain gradient: `coverage` lists them, a warning comes
    where they hold more than half of the elements, and `strict=True` refuses them.

    Args:
        model: any module, itself a layer included.
        correction: the rule, shared by all layers.
        skip: paths of modules (each with all below it) and module types to leave alone.
        strict: raise if a trainable parameter would keep the plain gradient in all of its uses, and was not skipped.

    Raises:
        TypeError: the correction is no `Correction`, or `skip` is a string.
        ValueError: layers have a correction already, unless it is this very one on all of them; a parameter has no
            shape yet, an entry of `skip` names no module, there is nothing to attach to, Opacus has hooked the model,
            or `strict` finds uncorrected parameters. The model is then unchanged.

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
    skipped = named_in_skip(model, skip)
    layers, attached = _correctable(model, skipped), [each for each in model.modules() if isinstance(each, Corrected)]
    if attached and {*attached} == {*layers.values()} and all(each._correction == correction for each in attached):
        if strict:
            _refuse_plain(correction_coverage(model, skipped))
        return model
    refuse_attached(
        "attach",
        model,
        "call adiv_optim.detach(model) before attaching another. A second optimizer on the same model needs no "
        "GradientOnly of its own: p.grad is corrected for both, so leave it unwrapped",
    )
    refuse_lazy("attach", model, skipped)
    if any(hasattr(parameter, "grad_sample") for parameter in model.parameters()):
        raise ValueError(
            "attach: Opacus has chosen how to find the gradient of each sample by the layers' classes, which a "
            "correction changes; attach it, or build GradientOnly, before make_private."
        )
    if not layers:
        types = ", ".join(sorted({type_name(type(module)) for module in model.modules()}))
        raise ValueError(
            f"nothing to correct: found modules of type {types}; a correction goes on {_correctable_types()} layers "
            "that are neither complex nor skipped; a subclass keeps the plain gradient."
        )
    coverage = _correct(model, layers, correction, skipped, strict).without_frozen_or_skipped()
    # FullyShardedDataParallel keeps parameters elsewhere, in one that is flat.
    is_flat = any(not list(layer.parameters()) for layer in layers.values())
    if coverage.elements and coverage.element_share < 0.5 and not is_flat:
        warn(
            f"the correction reaches {coverage.element_share:.1%} of {sum(coverage.elements.values()):,} trainable "
            f"elements; the rest keeps the plain gradient: {coverage.reasons()}. Make them layers of type "
            f"{_correctable_types()}, correct them by jacobian.backward, or name them in skip."
        )
    return model


def extend(
    model: nn.Module, correction: Correction, parameters: Iterable[Tensor], *, skip: Skip = (), strict: bool = False
) -> None:
    """Put a model's correction on layers that it got after `attach`: those that hold some of these parameters."""
    added_ids, skipped = set(map(id, parameters)), named_in_skip(model, skip, may_be_missing=True)
    refuse_lazy("attach", model, skipped)
    layers = {
        path: layer
        for path, layer in _correctable(model, skipped).items()
        if not isinstance(layer, Corrected) and any(id(parameter) in added_ids for parameter in layer.parameters())
    }
    _correct(model, layers, correction, skipped, strict)


def _correctable(model: nn.Module, skipped: Container[nn.Module]) -> dict[str, nn.Module]:
    uncalled, modules = bypassed(model), model.named_modules()
    return {path: module for path, module in modules if module not in skipped and not _why_plain(module, uncalled)}


def _correctable_types() -> str:
    return ", ".join(plain.__name__ for plain in CORRECTED)


def _correct(
    model: nn.Module, layers: dict[str, nn.Module], correction: Correction, skipped: Container[nn.Module], strict: bool
) -> Coverage:
    """Swap the classes of layers and return the model's coverage; undo it if `strict` finds what stays plain."""
    for path, module in layers.items():
        module.__dict__.update(_correction=correction, _label=f"{label(path)} ({type(module).__name__})", _ran=False)
        module.__class__ = _swap_class(type(module), CORRECTED)
    coverage = correction_coverage(model, skipped)
    try:
        if strict:
            _refuse_plain(coverage)
    except ValueError:
        for layer in layers.values():
            detach(layer)
        raise
    return coverage


def _refuse_plain(coverage: Coverage) -> None:
    # A new layer has not run, but may hold an older gradient.
    if plain := {path: why for path, why in coverage.skipped.items() if why != UNCALLED}:
        missed = "; ".join(f"{path} ({why})" for path, why in plain.items())
        raise ValueError(
            f"strict: {len(plain)} trainable parameters would keep the plain gradient: {missed}. "
            "Name their modules in skip, or pass strict=False."
        )


def detach(model: nn.Module) -> nn.Module:
    """Take every correction off a model, in place; classes and attributes are again those before `attach`.

    The same model is returned. A class that torch's parametrize or fully_shard made for a layer is made anew, over the
    plain one.

    Raises:
        ValueError: a layer has got a forward of its own since `attach`, which may call the corrected one.
    """
    corrected = {path: module for path, module in model.named_modules() if isinstance(module, Corrected)}
    if wrapped := [path for path, module in corrected.items() if "forward" in vars(module)]:
        raise ValueError(f"detach: {label(wrapped[0])} has got a forward of its own since attach; take that off first.")
    for module in corrected.values():
        module.__class__ = _swap_class(type(module), PLAIN)
        del module._correction, module._label, module._ran
    return model


def coverage(model: nn.Module) -> Coverage:
    """Return a `Coverage`: after a backward, each trainable parameter as corrected, skipped or never seen.

    A parameter is treated by the correction of its layer, once that has run with gradients enabled. One that several
    modules share is listed once; if only some of them are corrected layers it is "corrected … in part", and the part of
    the others in its gradient is plain. So is what a program adds that uses a weight without calling its layer, as in
    x @ layer.weight or a penalty on the weights, which the modules do not tell.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from adiv_optim import Proportional, attach, coverage
        >>> model = attach(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), Proportional())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> print(coverage(model))
        2 of 4 parameters are treated, 60.0% of 15 elements
        0.weight: corrected by Proportional
        0.bias: corrected by Proportional
        1.weight: skipped (LayerNorm is not a layer whose rows are known)
        1.bias: skipped (LayerNorm is not a layer whose rows are known)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"coverage takes a model, found {type(model).__name__}; of a wrapper call its coverage().")
    return correction_coverage(model)


def correction_coverage(
    model: nn.Module, skipped_modules: Container[nn.Module] = (), trained: bool = False
) -> Coverage:
    """Return the `coverage` of the model's corrections, without skipped modules, whatever wrappers there are.

    `trained`: a backward pass has run since they were attached; any layer that has run implies it.
    """
    owners_of: dict[nn.Parameter, dict[str, nn.Module]] = {}
    for path, owner in layers_of(model).items():
        for name, parameter in trainable(owner, path) if owner not in skipped_modules else ():
            owners_of.setdefault(parameter, {})[name] = owner
    treated, skipped, never_seen = dict[str, str](), dict[str, str](), dict[str, str]()
    elements: dict[str, int] = {}
    uncalled = bypassed(model)
    trained = trained or any(isinstance(module, Corrected) and module._ran for module in model.modules())
    for parameter, owners in owners_of.items():
        path = next(iter(owners))
        elements[path] = 0 if is_lazy(parameter) else parameter.numel()
        corrected = [owner for owner in owners.values() if isinstance(owner, Corrected)]
        plain = {
            name: _why_plain(owner, uncalled) or "no correction attached"
            for name, owner in owners.items()
            if owner not in corrected
        }
        rules = dict.fromkeys(type(owner._correction).__name__ for owner in corrected if owner._ran)
        if rules:
            part = "".join(f" in part: plain as {name} ({why})" for name, why in plain.items())
            treated[path] = ", ".join(f"corrected by {rule}{part}" for rule in rules)
        # The gradient may be older, or come from another process.
        elif corrected and (has_others() or not trained or parameter.grad is None):
            never_seen[path] = "its layer has not run"
        else:
            skipped[path] = ", ".join(dict.fromkeys([*plain.values(), *[UNCALLED] * bool(corrected)]))
    return Coverage(treated, skipped, never_seen, elements)


def _why_plain(module: nn.Module, uncalled: Mapping[nn.Module, str]) -> str:
    """Say why no correction goes on a module, or ""."""
    is_complex = any(parameter.is_complex() for parameter in module.parameters())
    return uncalled.get(module) or why_unknown_rows(module) or "complex" * is_complex


def _swap_class(kind: type, replacement: dict[type[nn.Module], type[nn.Module]]) -> type:
    """Return the class that takes the place of a layer's class.

    torch's parametrize and fully_shard make a class for a module, whose last base is the layer's class: such a class is
    made anew over the replacement.
    """
    if kind in replacement:
        return replacement[kind]
    namespace = {key: value for key, value in kind.__dict__.items() if key not in ("__dict__", "__weakref__")}
    *others, last = kind.__bases__
    return type(kind.__name__, (*others, _swap_class(last, replacement)), namespace)
