"""Measured inputs of layers in checkpoints; and how coverage and warnings describe them."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _device
from .._checks import check_like, warn
from .._device import local
from ..rows.coverage import UNCALLED, Coverage, uncalled_words
from .covariance import MeanSquare
from .layer_inputs import LayerInputs
from .roots import Factor, NoRootError
from .wrapper import OURS, WAITING, ours

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


class SavedEntries(NamedTuple):
    """The entries of a wrapper in a state dict, beside the state of the optimizer inside.

    Args:
        name: opens the messages of errors.
        prefix: how the names of the entries begin.
        settings: whole numbers that their shapes follow from.
        watch: remembers them.
        inner: the optimizer inside.
    """

    name: str
    prefix: str
    settings: Mapping[str, int]
    watch: Any
    inner: Optimizer

    def named(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return all entries of a parameter, by their names in a state dict."""
        every = {"steps": self.watch.steps, **self.settings, **entries}
        return {self.prefix + name: value for name, value in every.items()}

    def shown_and_waiting(self) -> tuple[dict[Tensor, dict[str, Any]], dict[Tensor, dict[str, Any]]]:
        """Return the entries beside the state that the optimizer keeps of each parameter, and those of others.

        Where that has none yet, a bare optimizer, which may load this, would take them for a state of its own.
        One that keeps none has none after a step either: torch.distributed.checkpoint wants all parameters then.
        """
        remembered, every = self.watch.remembered(), [p for group in self.inner.param_groups for p in group["params"]]
        if not remembered:
            return {}, {}
        with_state = [p for p in every if self.inner.state.get(p)]
        shown = {
            p: self.named(remembered.get(p, {})) for p in (with_state if with_state or not self.watch.steps else every)
        }
        # Of layers that have seen rows, and of weights that have scales.
        seen = {p: entries for p, entries in remembered.items() if self.watch.steps and entries.get("rows", 1)}
        return shown, {p: self.named(entries) for p, entries in seen.items() if p not in shown}

    def beside(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a state by parameter with the entries in it."""
        every = defaultdict(dict, state)
        for parameter, entries in self.shown_and_waiting()[0].items():
            every[parameter] = {**every[parameter], **entries}
        return every

    def keys(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any]]:
        """Yield each parameter with the key of its part in a state dict: a number, or its name."""
        for group, saved in zip(self.inner.param_groups, state_dict.get("param_groups", ()), strict=False):
            yield from zip(group["params"], saved.get("params", ()), strict=False)

    def added_to(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict of the optimizer inside with the entries in it."""
        (shown, waiting), keys, state = self.shown_and_waiting(), dict(self.keys(plain)), plain["state"]
        state = {**state, **{keys[p]: {**state.get(keys[p], {}), **entries} for p, entries in shown.items()}}
        later = {keys[p]: entries for p, entries in waiting.items() if p in keys}
        return {**plain, "state": state} | ({WAITING: later} if later else {})

    def taken_from(self, state_dict: Mapping[str, Any]) -> tuple[dict[Tensor, dict[str, Any]], dict[str, Any]]:
        """Return the entries in a state dict by parameter, and the state dict without them; changes nothing.

        Raises:
            ValueError: entries of other settings, or damaged.
        """
        remembered, loaded = self.watch.remembered(), dict[Tensor, dict[str, Any]]()
        parameters = {key: parameter for parameter, key in self.keys(state_dict)}
        rest: dict[str, dict[Any, Any]] = {"state": {}, WAITING: {}}
        for part, others in rest.items():
            for key, entries in state_dict.get(part, {}).items():
                names = [n for n in ours(entries) if n.startswith(self.prefix)]
                # A flat checkpoint that lacks a name has given an empty dict for it.
                mine = {n: entries[n] for n in names if entries[n] != {}}
                if mine and key in parameters:  # else the optimizer refuses the groups
                    wanted = self.named(remembered.get(parameters[key], {}))
                    self._check(mine, wanted, f"{self.name}: state_dict[{part!r}][{key!r}]")
                    loaded[parameters[key]] = {n.removeprefix(self.prefix): value for n, value in mine.items()}
                left = {n: value for n, value in entries.items() if n not in names} if names else entries
                if left or not names:
                    others[key] = left
        return loaded, {**state_dict, **rest}

    def _check(self, saved: Mapping[str, Any], wanted: Mapping[str, Any], place: str) -> None:
        for setting, here in self.settings.items():
            value = saved.get(self.prefix + setting)
            if isinstance(value, int) and value != here:
                saved_with = f"{setting}={value or None}, this has {setting}={here or None}"
                raise ValueError(f"{place} was saved with {saved_with}; {_REMEDY}.")
        check_like(saved, wanted, place, _REMEDY)

    def load(self, loaded: Mapping[Tensor, Mapping[str, Any]], rest: Mapping[str, Any]) -> None:
        """Let the watch take the entries that `taken_from` returned, and warn where a trained parameter has none."""
        remembered, kept = self.watch.remembered(), rest["state"]  # before it takes less
        self.watch.steps = next((entries["steps"] for entries in loaded.values()), 0)
        self.watch.load(loaded)
        lacking = [p for p, key in self.keys(rest) if p in remembered and p not in loaded and kept.get(key)]
        if lacking:
            warn(
                f"{self.name}: the checkpoint has nothing of what it remembers of {len(lacking)} of "
                f"{len(remembered)} parameters, which it measures anew. Save what state_dict() of the wrapper returns, "
                "or torch's get_optimizer_state_dict(model, wrapper), and not that of the optimizer inside."
            )


def load(
    layers: Sequence[LayerInputs],
    factors_of: Callable[[Any], Sequence[Factor]],
    remembered: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Take averages from a checkpoint, or begin anew where it has none, and factorise them."""
    for layer in layers:
        layer.forget()
        layer.factors, layer.failures, layer.spoiled = None, 0, 0
        entries, new = remembered.get(layer.weight, {}), layer.make(layer.modules[0], layer.bias is not None)
        device, dtype = layer.weight.device, _device.wide_dtype(layer.weight)
        memory = [entries.get(f"{n}", zeros).to(device, dtype) for n, zeros in enumerate(new.memory)]
        layer.covariance = new.with_memory(memory, entries.get("rows", 0.0))
        layer.held_scale = float(entries.get("last", 0.0))
        if layer.covariance.rows:
            try:
                layer.factors = [*factors_of(layer.covariance)]
            except NoRootError:
                layer.failures = 1


def coverage_of(
    model: nn.Module,
    layers: Sequence[LayerInputs],
    untreated: Mapping[str, str],
    treatment: Callable[[Any, Any], str],
) -> Coverage:
    """Say of every parameter that was looked at how it is treated, or why it is not."""
    treated: dict[str, str] = {}
    never_seen: dict[str, str] = {}
    skipped = dict(untreated)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for layer in layers:
        why = UNCALLED * _is_uncalled(layer) if layer.weight.requires_grad else "frozen"
        said = skipped if why else never_seen if layer.factors is None else treated
        how = why or f"{treatment(layer.covariance, layer.factors)}{_remark(layer)}"
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
    return layer.missed >= 2 and not layer.called and layer.factors is None and has_gradient(layer.weight)


def has_gradient(weight: nn.Parameter) -> bool:
    """Whether a weight has a gradient that is not 0; waits for the device."""
    rows = None if weight.grad is None else local(weight.grad)
    # A process without rows cannot tell.
    return rows is not None and (not rows.numel() or any(_device.read(rows.any())))


def _remark(layer: LayerInputs) -> str:
    words = f", {layer.failures} factorisations failed" if layer.failures else ""
    return words + (f", rows dropped {layer.spoiled} times: their squares held NaN or inf" if layer.spoiled else "")
