"""The watch over a model's layers: which of them, when their inputs are measured, and the stacks for a step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from .. import _device
from .._checks import check_count, check_not_negative, warn
from .._distributed import DataParallelGroup, Group, add_up, addresses
from ..rows.coverage import Coverage
from ..rows.models import SHARED_MEMORY, UNFLATTENED, Skip, named_in_skip, refuse_lazy, refuse_sharded
from .chart import Chart, Watching
from .covariance import MeanSquare
from .eligible_layers import eligible_layers, private_gradients, refuse_shards
from .layer_inputs import LayerInputs
from .memory import coverage_of, load, remembered_by, why_inactive
from .roots import Factor, NoRootError, Scales, stacked
from .step import Stack

#: Squares of whole numbers times it have remainders that are spread evenly and keep to no period (Weyl).
_GOLDEN = (5**0.5 - 1) / 2
#: Entries of a weight up to which layers are multiplied together: a call costs them more than its products.
_SMALL = 2**12


class Watch(Watching):
    """The layers of a model whose inputs are measured, and their stacks; it knows no optimizer.

    Args:
        name: whose errors these are.
        model: the model.
        chart: makes factors of covariances.
        make: (layer, with_bias) → the covariance of its inputs, before the first row.
        every, decay, process_group, skip: see `Whitened`.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        chart: Chart,
        make: Callable[[nn.Module, bool], MeanSquare],
        every: int,
        decay: float,
        process_group: DataParallelGroup,
        skip: Skip,
    ) -> None:
        self.name, self.model, self.chart, self.make = name, model, chart, make
        check_not_negative(name, decay=decay)
        if decay >= 1:
            raise ValueError(f"{name}: decay is {decay}; it must be at least 0 and below 1.")
        check_count(name, every=every)
        refuse_sharded(name, model, UNFLATTENED, only_flat=True)
        refuse_lazy(name, model, named_in_skip(model, skip))
        self.every, self.decay, self.process_group, self.skip = every, decay, process_group, skip
        self.steps = 0
        self.layers: list[LayerInputs] = []
        #: By name why other parameters are plain.
        self.plain: dict[str, str] = {}
        self.is_found = False
        #: The optimizer's parameters as layers were last looked for, where they were and whether they trained.
        self._places: list[Any] = []
        #: The layers that move, with their measurements; and in stacks, with R of each stack.
        self._moving: list[Any] = []
        self._stacks: list[tuple[list[LayerInputs], Stack | None]] = []

    def find(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        # Layers may be unfrozen one after the other, parametrized, or put into the memory of others.
        if self._places_of(groups) != self._places:
            self._find(groups)
            self._moving, self._stacks, self._places = [], [], self._places_of(groups)

    def _places_of(self, groups: Sequence[Sequence[nn.Parameter]]) -> list[Any]:
        parameters = [p for group in groups for p in group]
        if any(hasattr(parameter, "grad_sample") for parameter in parameters):
            raise private_gradients(self.name)
        plain = ["weight" in module._parameters for layer in self.layers for module in layer.modules]
        return [[len(group) for group in groups], plain, *addresses(parameters)]

    def _find(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        for layer in self.layers:
            if layer.weight.shape != layer.shape:
                raise ValueError(
                    f"{self.name}: the shape of {layer.name!r} has changed from {tuple(layer.shape)} to "
                    f"{tuple(layer.weight.shape)}, as of a layer that is pruned; build the optimizer from the model as "
                    "it is now, and wrap again."
                )
        group_of = {id(p): number for number, group in enumerate(groups) for p in group}
        parameters = [p for group in groups for p in group]
        eligible, self.plain = eligible_layers(self.name, self.model, parameters, self.skip, self.chart.bias_is_plain)
        # A layer that has been replaced leaves its record behind under the same name: the weight tells them apart.
        known = {(layer.name, id(layer.weight)): layer for layer in self.layers}
        layers = []
        for name, modules, with_bias in eligible:
            old = known.get((name, id(modules[0].get_parameter("weight"))))
            if old is not None and old.modules == modules and old.with_bias == with_bias:
                layers.append(old)
            else:
                layers.append(LayerInputs(name, modules, with_bias, self.make))
                layers[-1].step_index = self.steps
        refuse_shards(self.name, layers, self.process_group)
        for layer in layers:
            layer.groups = tuple(group_of[id(p)] for p in layer.parameters)
        if not layers and not self.is_found and not any(why.startswith(SHARED_MEMORY) for why in self.plain.values()):
            reasons = "; ".join(f"{path} ({why})" for path, why in list(self.plain.items())[:5])
            raise ValueError(
                f"{self.name}: no tensor the optimizer holds is the weight of a layer whose rows are known: {reasons}."
            )
        self.layers, self.is_found = layers, True

    def due(self) -> bool:
        """Whether the next step measures."""
        # While the average settles it is measured at every power of two; then once in each round of `every` steps, at
        # a place that no period of the training keeps to, as of a critic with real and generated samples in turns.
        number, place = divmod(self.steps, self.every)
        if number == 0:
            return place & (place - 1) == 0
        return place == int(self.every * (number * number * _GOLDEN % 1))

    def stacks(self) -> list[Stack]:
        if self.due():
            self._measure()
        with_factors = [layer for layer in self.layers if layer.factors is not None]
        layers = [layer for layer in with_factors if all(p.grad is not None for p in layer.parameters)]
        moving = [(layer, layer.factors, layer.groups, layer.held_scale) for layer in layers]
        if moving != self._moving:
            together: dict[Any, list[LayerInputs]] = {}
            for layer in layers:
                together.setdefault(_stacking_key(layer), []).append(layer)
            self._moving, self._stacks = moving, [(each, self._stack(each)) for each in together.values()]
        return [stack for _, stack in self._stacks if stack is not None]

    def _stack(self, layers: list[LayerInputs]) -> Stack | None:
        """Return the stack of some layers, or None where it would change nothing."""
        first, parameters = layers[0], [p for layer in layers for p in layer.parameters]
        factors: list[Factor] = first.factors or []
        if isinstance(factors[0], Scales):
            scale = _scale_of(first)
            start = first.held_scale or scale if self.chart.holds else scale
            return None if start == scale == 1 else Stack(parameters, [Scales([1 / start])], shrink=start / scale)
        return Stack(
            parameters,
            factors if len(layers) == 1 else [stacked([each.factors[0] for each in layers if each.factors])],
            layout=first.layout,
            layers=len(layers),
            blocks=first.covariance.blocks,
            moves_weights=self.chart.moves_weights,
            rescale=self.chart.rescale,
        )

    def _measure(self) -> None:
        """Let the rows that count into the averages and factorise these, or leave all as it was if cut short."""
        before = [(vars(layer), dict(vars(layer))) for layer in self.layers]
        is_told = any(layer.failures for layer in self.layers)
        try:
            errors = self._measure_pending()
        except BaseException:
            for attributes, old in before:
                attributes.update(old)
            raise
        if errors and not is_told:
            layer, error = next(iter(errors.items()))
            warn(
                f"{layer.name}: {error}; the layer keeps what was measured before, or takes plain steps. Further "
                "failures are counted in coverage() and metrics() without a word; a greater damping may help."
            )

    def _measure_pending(self) -> dict[LayerInputs, NoRootError]:
        """Return why layers that were seen have no new factors."""
        seen, errors = self._seen(), dict[LayerInputs, NoRootError]()
        for layer in seen:
            try:
                layer.covariance = layer.covariance.updated(layer.pending or [], layer.pending_rows, self.decay)
            except NoRootError as error:
                errors[layer] = error
            layer.forget()
        if self.process_group.several:
            _agree(seen, self.process_group.group)
        for layer in (each for each in seen if each not in errors):
            try:
                layer.factors = [*self.chart.factors(layer.covariance)]
            except NoRootError as error:
                errors[layer] = error
        for layer in errors:
            layer.failures += 1
        return errors

    def _seen(self) -> list[LayerInputs]:
        """Return the layers that have read rows which count, on any process, with finite sums over them."""
        for layer in self.layers:
            layer.settle()
        if self.process_group.several and self.layers:
            _add_up_rows(self.layers, self.process_group.group)
        for layer in self.layers:
            layer.missed = 0 if layer.pending_rows or layer.weight.grad is None else layer.missed + 1
        with_rows, seen = [layer for layer in self.layers if layer.pending_rows], []
        for layer, is_finite in zip(with_rows, _device.read(*(layer.finite() for layer in with_rows)), strict=True):
            if is_finite:
                seen.append(layer)
            else:
                layer.spoiled += 1
                layer.forget()
        return seen

    def count_step(self) -> None:
        if self.chart.holds:
            self._hold()
        self.steps += 1
        self.arm()

    def _hold(self) -> None:
        """Remember the scales that weights now stand in: still the old one where the learning rate is 0."""
        for (layer, *_), stack in self._stacks:
            if stack is None or stack.shrink == 1 or not stack.has_zero_lr:
                layer.held_scale = _scale_of(layer)

    def metrics(self) -> dict[str, float]:
        return self.chart.metrics(self.layers)

    def coverage(self) -> Coverage:
        return coverage_of(self.model, self.layers, self.plain, self.chart)

    def why_inactive(self) -> str:
        return why_inactive(self.layers)

    def remembered(self) -> dict[Tensor, dict[str, Any]]:
        return remembered_by(self.layers)

    def load(self, remembered: Mapping[Tensor, Mapping[str, Any]]) -> None:
        load(self.layers, self.chart, remembered)
        self.arm()

    def arm(self) -> None:
        """Let forward passes gather if the next step measures."""
        due = self.due()
        for layer in self.layers:
            layer.armed, layer.step_index = due, self.steps


def _scale_of(layer: LayerInputs) -> float:
    return 1.0 if layer.factors is None else float(layer.factors[0].divisor)


def _stacking_key(layer: LayerInputs) -> Any:
    """Return a key, equal for small layers of one shape."""
    covariance, weight = layer.covariance, layer.weight
    is_alone = type(covariance) is MeanSquare or len(covariance.blocks) > 1
    if is_alone or weight.numel() > _SMALL or hasattr(weight, "placements"):
        return id(layer)
    return type(covariance), layer.with_bias, weight.shape, weight.dtype, weight.device, layer.layout, layer.groups


def _add_up_rows(layers: Sequence[LayerInputs], group: Group) -> None:
    """Add up pending sums over processes, for all layers that any of them has seen, so that all take part."""
    counts = torch.tensor([layer.pending_rows for layer in layers], device=layers[0].weight.device)
    add_up([counts], group)
    blocks: list[Tensor] = []
    for layer, rows in zip(layers, counts.tolist(), strict=True):
        if rows:
            layer.pending_rows = rows
            sums = layer.covariance.no_sums() if layer.pending is None else layer.pending
            layer.pending = [tensor.clone() for tensor in sums]  # the old ones, where this is cut short
            blocks += layer.pending
    add_up(blocks, group)


def _agree(layers: Sequence[LayerInputs], group: Group) -> None:
    """Let all processes have the eigenvectors of the first.

    Others may differ by a sign, or by rounding that nearly equal eigenvalues make large, and the products with them of
    different processes could not be added up.
    """
    is_first = distributed.get_rank(group) == 0
    of_low_rank = [layer for layer in layers if layer.covariance.depends_on_memory]
    for layer in of_low_rank:  # made anew, not in place: stacks hold the old ones
        memory = [t.clone() if is_first else torch.zeros_like(t) for t in layer.covariance.memory]
        layer.covariance = layer.covariance.with_memory(memory, layer.covariance.rows)
    add_up([tensor for layer in of_low_rank for tensor in layer.covariance.memory], group)
