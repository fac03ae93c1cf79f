"""Measurements of a model, and a change of variables by them: the two parts of a mapped optimizer that it holds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .. import _device
from .._device import has_gradient
from ..rows.models import UNCALLED, Coverage, describe_uncalled
from .covariance import MeanSquare
from .layer_inputs import LayerInputs
from .roots import RightFactor
from .step import Stack
from .wrapper import OURS


class ChangeOfVariables(NamedTuple):
    """The variables that an optimizer steps in, by functions without a memory.

    Args:
        covariance: (layer, whether its bias is treated with the weight) → that of its inputs, before the first row.
        factors: covariance → R, block by block, or a NoRootError.
        treatment: (covariance, R or None) → in words, how a layer is treated.
        metrics: layers → numbers for a logger.
        keeps_norm: whether each layer's step, mapped back, gets the norm that the optimizer gave it.
        moves_weights: whether weights are mapped too, or gradients alone.
        why_bias_is_plain: why a bias is not treated with its weight, or "" if it is.
        holds: whether W' and not W is kept where R, a number, is measured anew.
    """

    covariance: Callable[[nn.Module, bool], MeanSquare]
    factors: Callable[[Any], Sequence[RightFactor]]
    treatment: Callable[[Any, Any], str]
    metrics: Callable[[Sequence[LayerInputs]], dict[str, float]]
    keeps_norm: bool = False
    moves_weights: bool = True
    why_bias_is_plain: str = ""
    holds: bool = False


class Watching(Protocol):
    """Measurements of a model, and the stacks of parameters that follow from them."""

    model: nn.Module
    #: The arguments of the wrapper, as its repr shows them.
    settings: Mapping[str, Any]
    #: How the names of its entries in a state dict begin, and the remedy where little is treated.
    prefix: str
    remedy: str = ""
    #: Steps so far.
    steps: int
    #: The layers whose forward passes are watched.
    layers: Sequence[LayerInputs] = ()
    #: Whether weights are mapped too, or gradients alone.
    moves_weights: bool = True

    def find(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Look at the parameters of the optimizer, by its parameter groups, if they have changed."""

    def stacks(self) -> Sequence[Stack]:
        """Measure if that is due, and return this step's stacks; other parameters take the plain step."""

    def count_step(self) -> None:
        """Count a step; the weights are the user's again."""

    def why_inactive(self) -> str:
        """Say, after the second step, why nothing has been treated so far, with the remedy; "" if something has."""
        return ""

    def metrics(self) -> dict[str, float]:
        """Return the last measurements, as scalars for a logger."""

    def coverage(self) -> Coverage:
        """Say of every parameter that was looked at how it is treated, or why it is not."""

    def remembered(self) -> Mapping[Tensor, dict[str, Any]]:
        """Return the memory of each parameter, with the same names and shapes before and after training."""

    def load(self, remembered: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take the memory of some parameters from a checkpoint, and forget that of others."""


class MeasuredLayers(Watching):
    """The layers whose inputs are measured, and why other parameters take the plain step."""

    prefix = f"{OURS}inputs."
    change: ChangeOfVariables
    layers: list[LayerInputs]
    #: By name why other parameters take the plain step.
    untreated: dict[str, str]
    factorise: Callable[[Mapping[LayerInputs, MeanSquare]], tuple[Mapping[LayerInputs, Any], Mapping[LayerInputs, Any]]]

    def remembered(self) -> dict[Tensor, dict[str, Any]]:
        # Averages alone, since factors follow from them.
        every: dict[Tensor, dict[str, Any]] = {}
        for layer in self.layers:
            covariance, weight = layer.covariance, layer.weight
            every[weight] = {f"{n}": tensor for n, tensor in enumerate(covariance.saved())}
            every[weight]["rows"] = covariance.rows
            if type(covariance) is MeanSquare:  # a scale of 0 is none yet
                dtype = _device.widest_dtype(weight.device)
                every[weight]["last"] = torch.tensor([layer.last_scale], dtype=dtype, device=weight.device)
        return every

    def load(self, remembered: Mapping[Tensor, Mapping[str, Any]]) -> None:
        for layer in self.layers:
            layer.drop_all()
            layer.drops = 0
            entries, new = (
                remembered.get(layer.weight, {}),
                self.change.covariance(layer.modules[0], layer.bias is not None),
            )
            device, dtype = layer.weight.device, _device.wide_dtype(layer.weight)
            statistics = [entries.get(f"{n}", zeros).to(device, dtype) for n, zeros in enumerate(new.saved())]
            layer.covariance = new.loaded(statistics, entries.get("rows", 0.0))
            layer.last_scale = float(entries.get("last", 0.0))
        factors, errors = self.factorise({layer: layer.covariance for layer in self.layers})
        for layer in self.layers:
            layer.factors, layer.failures = factors.get(layer), int(layer in errors)

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
            return f"those with {describe_uncalled(uncalled)}" if uncalled else ""
        if any(layer.failures for layer in layers):
            return "no covariance could be factorised; choose a greater damping."
        if any(layer.drops for layer in layers):
            return "the squares of what its layers read held NaN or inf; look for the first layer that returns them."
        return bool(layers) * (
            "no layer has seen a row. Train with gradients enabled, and wrap the optimizer before the first call of a "
            "model that torch.compile has compiled, which would not see the hooks."
        )


def _is_uncalled(layer: LayerInputs) -> bool:
    """Whether its weight has a gradient, though it has not been called since the watch began."""
    return layer.empty_measurements >= 2 and not layer.called and layer.factors is None and has_gradient(layer.weight)


def _remark(layer: LayerInputs) -> str:
    words = f", {layer.failures} factorisations failed" if layer.failures else ""
    return words + (f", rows dropped {layer.drops} times: their squares held NaN or inf" if layer.drops else "")
