"""What a mapped optimizer holds: measurements of a model, their entries in state dicts, and a change of variables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _device
from .._checks import check_like, warn
from .._device import has_gradient
from ..rows.models import UNCALLED, Coverage, describe_uncalled
from .covariance import MeanSquare
from .layer_inputs import LayerInputs
from .roots import RightFactor
from .step import Stack
from .wrapper import OURS, WITHOUT_STATE, parameters_and_keys, wrapper_entries

#: The remedy for a checkpoint that does not fit.
_REMEDY = (
    "load what was saved of the same model with the same settings, or leave the names out that begin with "
    f"{OURS!r} to measure anew"
)


class ChangeOfVariables(NamedTuple):
    """The variables that an optimizer steps in, by functions without a memory.

    Args:
        covariance: (layer, whether its bias is treated with the weight) → that of its inputs, before the first row.
        factors: covariance → R, block by block, or a LinAlgError.
        treatment: (covariance, R or None) → in words, how a layer is treated.
        keeps_norm: whether each layer's step, mapped back, gets the norm that the optimizer gave it.
        moves_weights: whether weights are mapped too, or gradients alone.
        why_bias_is_plain: why a bias is not treated with its weight, or "" if it is.
        holds: whether W' and not W is kept where R, a number, is measured anew.
    """

    covariance: Callable[[nn.Module, bool], MeanSquare]
    factors: Callable[[Any], Sequence[RightFactor]]
    treatment: Callable[[Any, Any], str]
    keeps_norm: bool = False
    moves_weights: bool = True
    why_bias_is_plain: str = ""
    holds: bool = False


class Measurements:
    """Measurements of a model, the stacks of parameters that follow from them, and their entries in state dicts.

    What is measured are inputs of `layers`; a subclass that measures something else says what it remembers of it.
    """

    #: Opens the messages of errors.
    name: str
    model: nn.Module
    #: The arguments of the wrapper, as its repr shows them.
    settings: Mapping[str, Any]
    #: How the names of its entries in a state dict begin, and the remedy where little is treated.
    prefix: str = f"{OURS}inputs."
    remedy: str = ""
    #: Steps so far.
    steps: int
    #: The layers whose forward passes are watched; by name why other parameters take the plain step.
    layers: Sequence[LayerInputs] = ()
    untreated: Mapping[str, str]
    change: ChangeOfVariables
    #: Whether weights are mapped too, or gradients alone.
    moves_weights: bool = True

    def find(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Look at the parameters of the optimizer, by its parameter groups, if they have changed."""

    def expect(self, weights: Iterable[Tensor], groups: Sequence[Mapping[str, Any]]) -> None:
        """Make room for measurements of these weights, frozen ones too; see `find`."""

    def stacks(self) -> Sequence[Stack]:
        """Measure if that is due, and return this step's stacks; other parameters take the plain step."""
        return ()

    def count_step(self) -> None:
        """Count a step; the weights are the user's again."""
        self.steps += 1

    def why_inactive(self) -> str:
        """Say, after the second step, why no layer has been treated so far, with the remedy; "" if one has."""
        if any(layer.factors is not None for layer in self.layers):
            uncalled = [layer.name for layer in self.layers if _is_uncalled(layer)]
            return f"those with {describe_uncalled(uncalled)}" if uncalled else ""
        if any(layer.failures for layer in self.layers):
            return "no covariance could be factorised; choose a greater damping."
        if any(layer.drops for layer in self.layers):
            return "the squares of what its layers read held NaN or inf; look for the first layer that returns them."
        return bool(self.layers) * (
            "no layer has seen a row. Build the optimizer from the model as it is now; train with gradients enabled; "
            "name layers in skip whose weights another module uses, as merged adapters are; and wrap the optimizer "
            "before the first call of a model that torch.compile has compiled, or of another of the same classes, "
            "whose graph has no hooks; or call torch._dynamo.reset() before that call."
        )

    def remembered(self) -> dict[Tensor, dict[str, Any]]:
        """Return the memory of each parameter, with the same names and shapes before and after training."""
        # Averages alone, since factors follow from them.
        every: dict[Tensor, dict[str, Any]] = {}
        for layer in self.layers:
            covariance, weight = layer.covariance, layer.weight
            every[weight] = {f"{n}": tensor for n, tensor in enumerate(covariance.statistics)}
            every[weight]["rows"] = covariance.rows
            if type(covariance) is MeanSquare:  # a scale of 0 is none yet
                dtype = _device.widest_dtype(weight.device)
                every[weight]["last"] = torch.tensor([layer.last_scale], dtype=dtype, device=weight.device)
        return every

    def load(self, remembered: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take the memory of some parameters from a checkpoint, and forget that of others."""

    def metrics(self) -> dict[str, float]:
        """Return counts, and of each layer the RMS of its inputs, with the bias's 1 where that is treated."""
        measured = [layer for layer in self.layers if layer.factors is not None]
        sizes = _device.read(*(layer.covariance.mean_square().mean().sqrt() for layer in measured))
        failures = sum(layer.failures for layer in self.layers)
        counts = {"layers_measured": len(measured), "failed_factorisations": failures}
        return counts | {f"{layer.name}/input_rms": size for layer, size in zip(measured, sizes, strict=True)}

    def coverage(self) -> Coverage:
        """Say of every parameter that was looked at how it is treated, or why it is not."""
        treated, never_seen, skipped = dict[str, str](), dict[str, str](), dict(self.untreated)
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

    def _named(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return all entries of a parameter, by their names in a state dict."""
        return {self.prefix + name: value for name, value in {"steps": self.steps, **entries}.items()}

    def add_to(self, plain: Mapping[str, Any], inner: Optimizer) -> dict[str, Any]:
        """Return a state dict of the optimizer inside with the entries in it.

        They stand beside the state that it keeps of a parameter, and apart where it keeps none: a bare optimizer, which
        may load this, would take them for a state of its own. If it keeps none of any parameter after a step, they
        stand in their places all the same, since torch.distributed.checkpoint wants all parameters then.
        """
        remembered, state, waiting = self.remembered(), {**plain["state"]}, dict[Any, Any]()
        every = dict(parameters_and_keys(inner, plain)) if remembered else {}
        with_state = [p for p in every if inner.state.get(p)]
        for parameter in with_state if with_state or not self.steps else [*every]:
            key = every.pop(parameter)
            state[key] = {**state.get(key, {}), **self._named(remembered.get(parameter, {}))}
        for parameter, key in every.items() if self.steps else ():
            # Of layers that have seen rows, and of weights that have scales.
            if (entries := remembered.get(parameter)) and entries.get("rows", 1):
                waiting[key] = self._named(entries)
        return {**plain, "state": state} | ({WITHOUT_STATE: waiting} if waiting else {})

    def split_from(
        self, state_dict: Mapping[str, Any], inner: Optimizer
    ) -> tuple[dict[Tensor, dict[str, Any]], dict[str, Any]]:
        """Return the entries in a state dict by parameter, and the rest of it; a ValueError where they do not fit."""
        parameters = {key: parameter for parameter, key in parameters_and_keys(inner, state_dict)}
        rest: dict[str, dict[Any, Any]] = {"state": {}, WITHOUT_STATE: {}}
        every = [(key, entries) for part in rest for key, entries in state_dict.get(part, {}).items()]
        rows = f"{self.prefix}rows"
        measured = [parameters[key] for key, e in every if key in parameters and rows in wrapper_entries(e)]
        self.expect(measured, inner.param_groups)
        remembered, loaded = self.remembered(), dict[Tensor, dict[str, Any]]()
        for part, others in rest.items():
            for key, entries in state_dict.get(part, {}).items():
                names = [n for n in wrapper_entries(entries) if n.startswith(self.prefix)]
                # A flat checkpoint that lacks a name has given an empty dict for it.
                saved = {n: entries[n] for n in names if entries[n] != {}}
                if saved and key in parameters:  # else the optimizer refuses the groups
                    # Of a layer that did not train yet, and does now, there are its steps alone.
                    wanted = self._named(remembered.get(parameters[key], {}) if len(saved) > 1 else {})
                    check_like(saved, wanted, f"{self.name}: state_dict[{part!r}][{key!r}]", _REMEDY)
                    loaded[parameters[key]] = {n.removeprefix(self.prefix): value for n, value in saved.items()}
                left = {n: value for n, value in entries.items() if n not in names} if names else entries
                if left or not names:
                    others[key] = left
        return loaded, {**state_dict, **rest}

    def load_all(self, loaded: Mapping[Tensor, Mapping[str, Any]], rest: Mapping[str, Any], inner: Optimizer) -> None:
        """Take the entries that `split_from` returned, and warn where a trained parameter has none."""
        remembered, kept = self.remembered(), rest["state"]  # before it takes less
        self.steps = next((entries["steps"] for entries in loaded.values()), 0)
        self.load(loaded)
        keys = parameters_and_keys(inner, rest)
        lacking = [p for p, key in keys if p in remembered and p not in loaded and kept.get(key)]
        if lacking:
            warn(
                f"{self.name}: the checkpoint has nothing of what it remembers of {len(lacking)} of "
                f"{len(remembered)} parameters, which it measures anew. Save what state_dict() of the wrapper returns, "
                "or torch's get_optimizer_state_dict(model, wrapper), and not that of the optimizer inside."
            )


def _is_uncalled(layer: LayerInputs) -> bool:
    """Whether its weight has a gradient, though it has not been called since the watch began."""
    return layer.empty_measurements >= 2 and not layer.called and layer.factors is None and has_gradient(layer.weight)


def _remark(layer: LayerInputs) -> str:
    words = f", {layer.failures} factorisations failed" if layer.failures else ""
    return words + (f", rows dropped {layer.drops} times: their squares held NaN or inf" if layer.drops else "")
