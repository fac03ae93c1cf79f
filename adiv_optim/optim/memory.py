"""The memory of a watch over layers in checkpoints, and its words on parameters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _device
from .._checks import check_like
from ..rows.coverage import UNCALLED, Coverage, uncalled_words
from .chart import Chart
from .covariance import MeanSquare
from .layer_inputs import LayerInputs
from .roots import NoRootError
from .wrapper import OURS

#: The remedy for a checkpoint that does not fit.
_REMEDY = (
    "load what was saved of the same model with the same settings, or leave the names out that begin with "
    f"{OURS!r} to measure anew"
)


def remembered_by(layers: Sequence[LayerInputs]) -> dict[Tensor, dict[str, Any]]:
    """Return the entries of a checkpoint by weight: averages alone, since factors follow from them."""
    every: dict[Tensor, dict[str, Any]] = {}
    for layer in layers:
        covariance, weight = layer.covariance, layer.weight
        every[weight] = {**{f"{n}": tensor for n, tensor in enumerate(covariance.memory)}, "rows": covariance.rows}
        if type(covariance) is MeanSquare:  # a scale of 0 is none yet
            dtype = _device.widest_dtype(weight.device)
            every[weight]["last"] = torch.tensor([layer.held_scale], dtype=dtype, device=weight.device)
    return every


def check_entries(saved: Mapping[str, Any], wanted: Mapping[str, Any], shaping: Iterable[str], place: str) -> None:
    """Raise a ValueError if a parameter's part of a checkpoint is of other settings than `wanted`, or damaged.

    `shaping` has the names of settings that the shapes follow from; `place` opens the message.
    """
    for setting in shaping:
        value, here = saved.get(setting), wanted[setting]
        if isinstance(value, int) and value != here:
            name = setting.rpartition(".")[2]
            saved_with = f"{name}={value or None}, this has {name}={here or None}"
            raise ValueError(f"{place} was saved with {saved_with}; {_REMEDY}.")
    check_like(saved, wanted, place, _REMEDY)


def load(layers: Sequence[LayerInputs], chart: Chart, remembered: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Take averages from a checkpoint, or begin anew where it has none, and factorise them."""
    for layer in layers:
        layer.forget()
        layer.factors, layer.failures, layer.spoiled = None, 0, 0
        entries, new = remembered.get(layer.weight, {}), layer.make(layer.modules[0], layer.with_bias)
        device, dtype = layer.weight.device, _device.wide_dtype(layer.weight)
        memory = [entries.get(f"{n}", zeros).to(device, dtype) for n, zeros in enumerate(new.memory)]
        layer.covariance = new.with_memory(memory, entries.get("rows", 0.0))
        layer.held_scale = float(entries.get("last", 0.0))
        if layer.covariance.rows:
            try:
                layer.factors = [*chart.factors(layer.covariance)]
            except NoRootError:
                layer.failures = 1


def coverage_of(model: nn.Module, layers: Sequence[LayerInputs], plain: Mapping[str, str], chart: Chart) -> Coverage:
    """Say of every parameter that was looked at how it is treated, or why it is not."""
    treated: dict[str, str] = {}
    never_seen: dict[str, str] = {}
    skipped = dict(plain)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for layer in layers:
        why = UNCALLED * _is_uncalled(layer) if layer.weight.requires_grad else "frozen"
        said = skipped if why else never_seen if layer.factors is None else treated
        how = why or f"{chart.treatment(layer.covariance, layer.factors)}{_remark(layer)}"
        verb = "" if layer.factors is None else f"{how.partition(',')[0]}, "
        for place, parameter in enumerate(layer.parameters):
            if name := names.get(id(parameter)):  # another one may have taken its place
                said[name] = how if why or place == 0 else f"{verb}with its weight"
    return Coverage(treated, skipped, never_seen)


def why_inactive(layers: Sequence[LayerInputs]) -> str:
    """Say why no layer has been measured, or why some have not whose weights have gradients."""
    if any(layer.factors is not None for layer in layers):
        uncalled = [layer.name for layer in layers if _is_uncalled(layer)]
        return f"those with {uncalled_words(uncalled)}" if uncalled else ""
    if any(layer.failures for layer in layers):
        return "no covariance could be factorised; choose a greater damping."
    if any(layer.spoiled for layer in layers):
        return "the squares of what its layers read held NaN or inf; look for the first layer that returns them."
    return bool(layers) * (
        "no layer has seen a row. Train with gradients enabled, and wrap the optimizer before the first call of a "
        "model that torch.compile has compiled, which would not see the hooks."
    )


def _is_uncalled(layer: LayerInputs) -> bool:
    """Whether its weight has a gradient, though it has not been called since the watch began."""
    return layer.missed >= 2 and not layer.called and layer.factors is None and layer.has_gradient()


def _remark(layer: LayerInputs) -> str:
    words = f", {layer.failures} factorisations failed" if layer.failures else ""
    return words + (f", rows dropped {layer.spoiled} times: their squares held NaN or inf" if layer.spoiled else "")
