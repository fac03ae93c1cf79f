"""The watch over a model's layers: which of them, when their inputs are measured, and the stacks for a step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.linalg import LinAlgError

from .. import _device
from .._checks import check_count, check_not_negative, warn
from .._distributed import process_group_of
from ..rows.models import FSDP1_REMEDY, SHARED_MEMORY, Skip, listed, named_in_skip, refuse_lazy, refuse_sharded
from .covariance import MeanSquare, stacked_covariance
from .eligible_layers import eligible_layers, refuse_private_gradients
from .layer_inputs import LayerInputs
from .measurements import ChangeOfVariables, Measurements
from .parameters import check_model, unwrapped
from .processes import add_up_sums, agree, refuse_shards
from .roots import RightFactor, Scales
from .step import Stack

#: Squares of whole numbers times it have remainders that are spread evenly and keep to no period (Weyl).
_GOLDEN = (5**0.5 - 1) / 2

_NAMES = ("weight", "bias")
#: Entries of a weight up to which layers are multiplied together: a call costs them more than its products.
_SMALL, _SMALL_ON_ACCELERATORS = 2**12, 2**22


class Watch(Measurements):
    """The layers of a model whose inputs are measured, and their stacks; it knows no optimizer.

    Args:
        name: whose errors these are.
        change: makes covariances, and factors of them.
        every, decay, process_group, skip: see `Whitened`.
        settings: further arguments of the wrapper, for its repr.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        change: ChangeOfVariables,
        *,
        every: int,
        decay: float,
        process_group: Any,
        skip: Skip,
        **settings: Any,
    ) -> None:
        check_model(name, model)
        check_not_negative(name, decay=decay)
        if decay >= 1:
            raise ValueError(f"{name}: decay is {decay}; it must be at least 0 and below 1.")
        check_count(name, every=every)
        self.name, self.model, self.change = name, unwrapped(model), change
        self.every, self.decay, self.process_group = every, float(decay), process_group
        self.skip = listed(skip)
        self.settings = {**settings, "decay": decay, "every": every, "process_group": process_group, "skip": self.skip}
        refuse_sharded(name, self.model, FSDP1_REMEDY, only_flat=True)
        refuse_lazy(name, self.model, named_in_skip(self.model, self.skip))
        # Before an optimizer that holds another one is told to go around the wrapper, as Opacus's could not.
        refuse_private_gradients(name, self.model.parameters())
        self.steps, self.moves_weights = 0, change.moves_weights
        self.layers: list[LayerInputs] = []
        self.untreated: dict[str, str] = {}
        #: Weights that a checkpoint has measurements of.
        self._expected: set[Tensor] = set()
        #: The optimizer's parameters as layers were last looked for, where they were and whether they trained.
        self._signature: list[Any] = []
        #: The layers that move, with their measurements; and in stacks, with R of each stack.
        self._moving: list[Any] = []
        self._stacks: list[tuple[list[LayerInputs], Stack | None]] = []

    def find(self, groups: Sequence[Mapping[str, Any]]) -> None:
        # Layers may be unfrozen one after the other, parametrized, or put into the memory of others.
        if self._signature_of(groups) != self._signature:
            self._find(groups)
            self._moving, self._stacks, self._signature = [], [], self._signature_of(groups)
            self._arm()

    def _signature_of(self, groups: Sequence[Mapping[str, Any]]) -> list[Any]:
        parameters = [p for group in groups for p in group["params"]]
        private = [hasattr(parameter, "grad_sample") for parameter in parameters]
        held = {id(each) for each in (*parameters, None)}  # None is a weight's that has been parametrized
        both = [zip(x.parameters, map(m._parameters.get, _NAMES), strict=False) for x in self.layers for m in x.modules]
        others = [new is not old and id(new) in held for each in both for old, new in each]
        return [[len(group["params"]) for group in groups], private, others, *_device.addresses(parameters)]

    def expect(self, weights: Iterable[Tensor], groups: Sequence[Mapping[str, Any]]) -> None:
        self._expected, self._signature = {*weights}, [None]  # not as at first
        self.find(groups)

    def _find(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for layer in self.layers:
            if layer.weight.shape != layer.shape:
                raise ValueError(
                    f"{self.name}: the shape of {layer.name!r} has changed from {tuple(layer.shape)} to "
                    f"{tuple(layer.weight.shape)}, as of a layer that is pruned; build the optimizer from the model as "
                    "it is now, and wrap again."
                )
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        parameters = [p for group in groups for p in group["params"]]
        eligible, self.untreated = eligible_layers(
            self.name, self.model, parameters, self.skip, self.change.why_bias_is_plain
        )
        # A layer that has been replaced leaves its record behind under the same name: the parameters tell them apart.
        known: dict[Any, LayerInputs] = {(old.name, old.weight, old.bias, *old.modules): old for old in self.layers}
        layers = []
        for name, modules, with_bias in eligible:
            weight = modules[0].get_parameter("weight")
            old = known.get((name, weight, modules[0].bias if with_bias else None, *modules))
            if not weight.requires_grad and old is None and weight not in self._expected:
                continue  # one that has never trained takes no memory
            layers.append(old or LayerInputs(name, modules, with_bias, self.change.covariance(modules[0], with_bias)))
            layers[-1].groups = tuple(group_of[id(p)] for p in layers[-1].parameters)
        refuse_shards(self.name, layers, process_group_of(self.name, self.process_group))
        whys = self.untreated.values()
        if not layers and not self._signature and not any(why.startswith(SHARED_MEMORY) for why in whys):
            reasons = "; ".join(f"{path} ({why})" for path, why in list(self.untreated.items())[:5])
            raise ValueError(
                f"{self.name}: no tensor the optimizer holds is the weight of a layer that it can measure: {reasons}."
            )
        self.layers = layers

    def is_due(self) -> bool:
        """Whether the next step measures."""
        # While the average settles it is measured at every power of two; then once in each round of `every` steps, at
        # a place that no period of the training keeps to, as of a critic with real and generated samples in turns.
        number, place = divmod(self.steps, self.every)
        if number == 0:
            return place & (place - 1) == 0
        return place == int(self.every * (number * number * _GOLDEN % 1))

    def stacks(self) -> list[Stack]:
        if self.is_due():
            self._measure()
        layers = [layer for layer in self.layers if layer.factors and all(p.grad is not None for p in layer.parameters)]
        moving = [(layer, layer.factors, layer.groups, layer.last_scale) for layer in layers]
        if moving != self._moving:
            self._moving, self._stacks = moving, [(each, self._stack(each)) for each in kinds(layers)]
        return [stack for _, stack in self._stacks if stack is not None]

    def _stack(self, layers: list[LayerInputs]) -> Stack | None:
        """Return the stack of some layers, or None where it would change nothing."""
        first, parameters = layers[0], [p for layer in layers for p in layer.parameters]
        factors: list[RightFactor] = first.factors or []
        if isinstance(factors[0], Scales):
            scale = factors[0].divisor
            start = first.last_scale or scale if self.change.holds else scale
            return None if start == scale == 1 else Stack(parameters, [Scales([1 / start])], shrink=start / scale)
        return Stack(
            parameters,
            [factor.stacked(others) for factor, *others in zip(*(each.factors or () for each in layers), strict=True)],
            layout=first.layout,
            layers=len(layers),
            blocks=first.covariance.blocks,
            moves_weights=self.moves_weights,
            keeps_norm=self.change.keeps_norm,
        )

    def _measure(self) -> None:
        """Let the rows that count into the averages, and factorise these; cut short, it goes on with the next call."""
        counted = [layer.counted() for layer in self.layers]
        several = bool(self.layers) and distributed.is_available() and distributed.is_initialized()
        if several:
            group = process_group_of(self.name, self.process_group)
            counted = add_up_sums(self.layers, counted, group)
        seen = {layer: sums for layer, sums in zip(self.layers, counted, strict=True) if sums is not None}
        counted.clear()
        totals = (torch.stack([part.sum() for part in sums.parts]).sum() for sums in seen.values())
        total_of = dict(zip(seen, _device.read(*totals), strict=True))
        warned, errors = any(layer.failures for layer in self.layers), dict[LayerInputs, LinAlgError]()
        for layers in kinds(self.layers):  # one after the other: of one alone there are old and new averages at a time
            averages: dict[LayerInputs, MeanSquare] = {}
            for layer in layers:
                if layer in seen and math.isfinite(total_of[layer]):
                    try:
                        averages[layer] = layer.covariance.updated(seen[layer], self.decay)
                    except LinAlgError as error:
                        averages[layer], errors[layer] = layer.covariance, error
            if several:
                averages = agree(averages, group)
            present = {layer: averages.get(layer, layer.covariance) for layer in layers if averages}
            factors, failed = self.factorise(present)
            errors |= {layer: error for layer, error in failed.items() if layer in averages}
            for layer in layers:
                is_seen = seen.pop(layer, None) is not None or layer.weight.grad is None
                layer.empty_measurements = 0 if is_seen else layer.empty_measurements + 1
                layer.drops += not math.isfinite(total_of.get(layer, 0.0))
                layer.failures += layer in errors
                layer.drop_all()
                layer.covariance = averages.get(layer, layer.covariance)
                layer.factors = factors.get(layer, layer.factors)
        if errors and not warned:
            layer, why = next(iter(errors.items()))
            warn(
                f"{layer.name}: {why}; the layer keeps what was measured before, or takes plain steps. Further "
                "failures are counted in coverage() and metrics() without a word; a greater damping may help."
            )

    def factorise(
        self, averages: Mapping[LayerInputs, MeanSquare]
    ) -> tuple[dict[LayerInputs, list[RightFactor]], dict[LayerInputs, LinAlgError]]:
        """Return R of every layer that has seen rows, block by block; and why others of these have none.

        Layers of one kind go together, whichever of them was measured last: a run that goes on from a checkpoint has
        the same R then, to the last bit.
        """
        together: dict[Any, dict[LayerInputs, MeanSquare]] = {}
        for layer, average in averages.items():
            if average.rows:
                together.setdefault((stacking_key(layer), average.rows), {})[layer] = average
        factors, errors = dict[LayerInputs, list[RightFactor]](), dict[LayerInputs, LinAlgError]()
        left = [*together.values()]
        while left:
            each = left.pop()
            try:
                stacks = self.change.factors(stacked_covariance([*each.values()]))
                by_layer = zip(*(stack.unstacked(len(each)) for stack in stacks), strict=True)
                factors |= zip(each, map(list, by_layer), strict=True)
            except LinAlgError as error:
                if len(each) == 1:
                    errors |= dict.fromkeys(each, error)
                else:  # those that have one get it
                    left += [{layer: average} for layer, average in each.items()]
        return factors, errors

    def count_step(self) -> None:
        # The scales that weights now stand in: still the old one where the learning rate is 0.
        for (layer, *_), stack in self._stacks if self.change.holds else ():
            if stack is None or stack.shrink == 1 or not stack.has_zero_lr:
                layer.last_scale = layer.factors[0].divisor if layer.factors else 1.0
        self.steps += 1
        self._arm()

    def load(self, remembered: Mapping[Tensor, Mapping[str, Any]]) -> None:
        for layer in self.layers:
            layer.drop_all()
            layer.drops, entries = 0, remembered.get(layer.weight, {})
            new = self.change.covariance(layer.modules[0], layer.bias is not None)
            device, dtype = layer.weight.device, _device.wide_dtype(layer.weight)
            statistics = [entries.get(f"{n}", zeros).to(device, dtype) for n, zeros in enumerate(new.statistics)]
            layer.covariance = new.with_statistics(statistics, entries.get("rows", 0.0))
            layer.last_scale = float(entries.get("last", 0.0)) if self.change.holds else 0.0
        factors, errors = self.factorise({layer: layer.covariance for layer in self.layers})
        for layer in self.layers:
            layer.factors, layer.failures = factors.get(layer), int(layer in errors)
        self._arm()

    def _arm(self) -> None:
        """Let forward passes gather if the next step measures."""
        for layer in self.layers:
            layer.armed = self.is_due()


def kinds(layers: Iterable[LayerInputs]) -> list[list[LayerInputs]]:
    """Return layers by their `stacking_key`."""
    by_key: dict[Any, list[LayerInputs]] = {}
    for layer in layers:
        by_key.setdefault(stacking_key(layer), []).append(layer)
    return [*by_key.values()]


def stacking_key(layer: LayerInputs) -> Any:
    """Return a key, equal for small layers of one shape."""
    covariance, weight = layer.covariance, layer.weight
    most = _SMALL_ON_ACCELERATORS if _device.on_accelerator(weight) else _SMALL
    if type(covariance) is MeanSquare or weight.numel() > most or hasattr(weight, "placements"):
        return id(layer)
    return type(covariance), layer.bias is None, weight.shape, weight.dtype, weight.device, layer.layout, layer.groups
