"""The layers of a model with what was measured of each: their entries in checkpoints, coverage and warnings."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import _device
from .._device import local
from ..rows.coverage import UNCALLED, Coverage, uncalled_words
from .covariance import MeanSquare
from .layer_inputs import LayerInputs
from .roots import NoRootError
from .watching import ChangeOfVariables, Watching


class MeasuredLayers(Watching):
    """The layers whose inputs are measured, and why other parameters take the plain step."""

    change: ChangeOfVariables
    #: (layer, with_bias) → the covariance of its inputs, before the first row.
    make: Callable[[nn.Module, bool], MeanSquare]
    layers: list[LayerInputs]
    #: By name why other parameters take the plain step.
    untreated: dict[str, str]

    def remembered(self) -> dict[Tensor, dict[str, Any]]:
        # Averages alone, since factors follow from them.
        every: dict[Tensor, dict[str, Any]] = {}
        for layer in self.layers:
            covariance, weight = layer.covariance, layer.weight
            every[weight] = {f"{n}": tensor for n, tensor in enumerate(covariance.statistics)}
            every[weight]["rows"] = covariance.rows
            if type(covariance) is MeanSquare:  # a scale of 0 is none yet
                dtype = _device.widest_dtype(weight.device)
                every[weight]["last"] = torch.tensor([layer.held_scale], dtype=dtype, device=weight.device)
        return every

    def load(self, remembered: Mapping[Tensor, Mapping[str, Any]]) -> None:
        for layer in self.layers:
            layer.forget()
            layer.factors, layer.failures, layer.spoiled = None, 0, 0
            entries, new = remembered.get(layer.weight, {}), self.make(layer.modules[0], layer.bias is not None)
            device, dtype = layer.weight.device, _device.wide_dtype(layer.weight)
            statistics = [entries.get(f"{n}", zeros).to(device, dtype) for n, zeros in enumerate(new.statistics)]
            layer.covariance = new.with_statistics(statistics, entries.get("rows", 0.0))
            layer.held_scale = float(entries.get("last", 0.0))
            if layer.covariance.rows:
                try:
                    layer.factors = [*self.change.factors(layer.covariance)]
                except NoRootError:
                    layer.failures = 1

    def metrics(self) -> dict[str, float]:
        return self.change.metrics(self.layers)

    def coverage(self) -> Coverage:
        treated: dict[str, str] = {}
        never_seen: dict[str, str] = {}
        skipped = dict(self.untreated)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for layer in self.layers:
            why = UNCALLED * _is_uncalled(layer) if layer.weight.requires_grad else "frozen"
            said = skipped if why else never_seen if layer.factors is None else treated
            how = why or f"{self.change.treatment(layer.covariance, layer.factors)}{_remark(layer)}"
            verb = "" if layer.factors is None else f"{how.partition(',')[0]}, "
            for place, parameter in enumerate(layer.parameters):
                if name := names.get(id(parameter)):  # another one may have taken its place
                    said[name] = how if why or place == 0 else f"{verb}with its weight"
        return Coverage(treated, skipped, never_seen)

    def why_inactive(self) -> str:
        layers = self.layers
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
    return layer.missed >= 2 and not layer.called and layer.factors is None and has_gradient(layer.weight)


def has_gradient(weight: nn.Parameter) -> bool:
    """Whether a weight has a gradient that is not 0; waits for the device."""
    rows = None if weight.grad is None else local(weight.grad)
    # A process without rows cannot tell.
    return rows is not None and (not rows.numel() or any(_device.read(rows.any())))


def _remark(layer: LayerInputs) -> str:
    words = f", {layer.failures} factorisations failed" if layer.failures else ""
    return words + (f", rows dropped {layer.spoiled} times: their squares held NaN or inf" if layer.spoiled else "")
