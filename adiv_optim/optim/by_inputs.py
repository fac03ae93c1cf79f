"""What optimizers share that measure the inputs of a model's layers: which layers, when, and what is kept of them."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._linalg.roots import NoRootError
from ..attach.checks import bypassed, refuse_flat, refuse_lazy
from ..attach.coverage import Coverage, warn
from .checkpoint import ANYTHING, COUNT, check
from .coordinates import Chart, Coordinates, Map
from .processes import Processes, add_up, holders
from .rows import why_not_rows
from .shards import refuse_shards
from .sums import InputSums

#: What is kept of a layer's inputs, and what a measurement makes of it.
Sums = TypeVar("Sums", bound=InputSums)
Measured = TypeVar("Measured")


@dataclass(eq=False, kw_only=True)
class InputChart(Chart, Generic[Sums, Measured]):
    """What is measured of the inputs of a model's layers, and what a step makes of it.

    Args:
        every: steps between two measurements.
        decay: how much the average of earlier measurements counts at each new one.
        synchronize: add up over processes.
        process_group: which processes those are.
    """

    #: Why a bias is not treated with its weight, or "" if it is.
    bias_is_plain: ClassVar[str] = ""

    every: int
    decay: float
    synchronize: bool
    process_group: Processes

    def __post_init__(self) -> None:
        #: What is measured, and why everything else is not.
        self.layers: list[Sums] = []
        self.plain: dict[str, str] = {}
        self.steps = 0
        self.measured: dict[str, Measured] = {}
        #: By layer, how often its covariance could not be factorised; what was measured before then stays in use.
        self.failures: dict[str, int] = {}

    def settings(self) -> dict[str, Any]:
        """Return what it was built with, as the repr shows it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def partials(self) -> int:
        """How many numbers a map's `partial` has; 0 where `leave` needs to know of no other rows."""
        return 0

    @abstractmethod
    def sums(self, name: str, modules: list[nn.Module], with_bias: bool) -> Sums:
        """Return what is to be kept of a layer's inputs; see `InputSums` for the arguments."""

    @abstractmethod
    def measure(self, layer: Sums) -> Measured:
        """Make of a layer's average what its maps need.

        Raises:
            NoRootError: it cannot be factorised.
        """

    @abstractmethod
    def map(self, layer: Sums, measured: Measured) -> Map | None:
        """Return the map of a layer's weight and bias, or None if the step is the plain one."""

    @abstractmethod
    def how(self, layer: Sums, measured: Measured | None) -> str:
        """Say in words what is done to a layer, or would be once something is measured."""

    def maps(self) -> Iterable[Map]:
        """Return one map for each weight whose inputs were seen and that has a gradient."""
        if self._due():
            if self.synchronize and self.process_group.several:
                _sum_over_processes(self.layers, self.process_group)
            for layer in self.layers:
                self._measure(layer)
        maps = []
        for layer in self.layers:
            missing = [p.grad is None for p in layer.parameters]
            if layer.name not in self.measured or all(missing):
                continue
            if any(missing):
                raise ValueError(
                    f"{layer.name!r} or its bias has no gradient, and the other one has; what of a layer trains must "
                    "be settled when the optimizer is wrapped. Freeze first, and wrap it again."
                )
            found = self.map(layer, self.measured[layer.name])
            maps += [found] if found is not None else []
        return maps

    def settle(self, maps: Mapping[Map, Sequence[Tensor]]) -> None:
        """Add up what maps know of the rows held here over the processes that hold the others, for all layers at once.

        Every sharded layer has its place, so that all processes take part in the same sum whatever they have measured.
        """
        sums: dict[Any, list[Tensor]] = {}
        by_weight = {id(map_.parameters[0]): map_ for map_ in maps}
        for layer in self.layers if self.partials else ():
            if (group := holders(layer.weight)) is not None:
                found = by_weight.get(id(layer.weight))
                none = torch.zeros(self.partials, dtype=torch.float64, device=layer.weight.device)
                sums.setdefault(group, []).append(none if found is None else found.partial(maps[found]))
        for group, partials in sums.items():
            add_up(partials, group)

    def _measure(self, layer: Sums) -> None:
        try:
            if layer.absorb(self.decay):
                self.measured[layer.name] = self.measure(layer)
        except NoRootError as error:
            if not self.failures:
                warn(
                    f"{layer.name}: {error}; the layer keeps what was measured before, or takes plain steps. Further "
                    "failures are counted in coverage() and metrics() without a word; a greater damping may help."
                )
            self.failures[layer.name] = self.failures.get(layer.name, 0) + 1

    def after_step(self) -> None:
        """Count the step, and let the forward passes before the next one gather if it measures."""
        self.steps += 1
        self._arm()

    def _arm(self) -> None:
        for layer in self.layers:
            layer.armed = self._due()

    def _due(self) -> bool:
        # While the average settles it is measured at every power of two.
        return self.steps % self.every == 0 or (self.steps < self.every and self.steps & (self.steps - 1) == 0)

    def coverage(self) -> Coverage:
        """Say of every trainable parameter how it is treated, or why it is not."""
        treated: dict[str, str] = {}
        never_seen: dict[str, str] = {}
        for layer in self.layers:
            measured = self.measured.get(layer.name)
            failed = f", {count} factorisations failed" if (count := self.failures.get(layer.name)) else ""
            found = never_seen if measured is None else treated
            found[layer.name] = how = f"{self.how(layer, measured)}{failed}"
            if layer.with_bias:
                first = "" if measured is None else f"{how.partition(',')[0]}, "
                found[layer.name.removesuffix("weight") + "bias"] = f"{first}with its weight"
        return Coverage(treated, self.plain, never_seen)

    def why_inactive(self) -> str:
        """Say why no layer has been measured."""
        if self.measured:
            return ""
        if self.failures:
            return "no covariance could be factorised; choose a greater damping."
        return (
            "no layer has seen a row. Train with gradients enabled, and wrap the optimizer before the first call of a "
            "model that torch.compile has compiled, which would not see the hooks."
        )

    def metrics(self) -> dict[str, float]:
        """Return what was measured last."""
        return {"layers_measured": len(self.measured), "failed_factorisations": sum(self.failures.values())}

    def state_dict(self) -> dict[str, Any]:
        """Return covariances and the counter; what is made of them follows from them."""
        return {"steps": self.steps, "layers": {layer.name: layer.state_dict() for layer in self.layers}}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse the state of other layers."""
        wanted = {"steps": COUNT, "layers": {layer.name: ANYTHING for layer in self.layers}}
        check(state, wanted, path := "state_dict['chart']", self.remedy)
        for layer in self.layers:
            layer.check_state_dict(state["layers"][layer.name], f"{path}['layers'][{layer.name!r}]", self.remedy)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them from a checkpoint; an empty one makes the chart forget."""
        self.steps, self.measured, self.failures = state.get("steps", 0), {}, {}
        for layer in self.layers:
            layer.reset()
            if state:
                layer.load_state_dict(state["layers"][layer.name])
                if layer.total is not None:
                    try:
                        self.measured[layer.name] = self.measure(layer)
                    except NoRootError:
                        self.failures[layer.name] = 1
        self._arm()


#: What to do where parameters are flattened.
UNFLATTENED = "use fully_shard, or GradientOnly, which goes with FSDP1"


class ByInputs(Coordinates):
    """An optimizer whose steps are measured by the inputs of the layers they are taken in; see `Whitened`.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS.
        model: the model.
        chart: what is measured.
    """

    chart: InputChart[Any, Any]

    def __init__(self, optimizer: Optimizer, model: nn.Module, chart: InputChart[Any, Any]) -> None:
        name = type(self).__name__
        if not 0 <= chart.decay < 1:
            raise ValueError(f"{name}: decay is {chart.decay}; it must be at least 0 and below 1.")
        refuse_no_count(name, every=chart.every)
        super().__init__(optimizer, model, chart)
        refuse_flat(name, model, UNFLATTENED)
        self._find_layers()
        reasons = "; ".join(f"{path} ({why})" for path, why in list(chart.plain.items())[:5])
        if not chart.layers:
            raise ValueError(
                f"{name}: no tensor the optimizer holds is the weight of a layer whose rows are known: {reasons}."
            )
        trained = sum(p.numel() for group in self.param_groups for p in group["params"] if p.requires_grad)
        if 2 * sum(p.numel() for layer in chart.layers for p in layer.parameters) < trained:
            warn(
                f"{name} treats less than half of the elements of {type(model).__name__} that the optimizer holds; the "
                f"others take plain steps: {self.coverage().reasons()}. coverage() lists every parameter."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; rows seen before the next forward pass do not count any more."""
        super().zero_grad(set_to_none)
        for layer in self._layers():
            layer.dropped = layer.pending is not None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer, and treat the layers that it brings."""
        super().add_param_group(param_group)
        if isinstance(self.chart, InputChart):
            self._find_layers()

    def detach(self) -> nn.Module:
        """Take the hooks off the model; the optimizer goes on with plain steps."""
        for layer in self._layers():
            layer.remove_hooks()
        return super().detach()

    def _layers(self) -> list[InputSums]:
        return self.chart.layers if isinstance(self.chart, InputChart) else []  # once detached there are none

    def _find_layers(self) -> None:
        refuse_lazy(type(self).__name__, self.model)
        chart = self.chart
        held = {id(p) for group in self.param_groups for p in group["params"]}
        users: dict[int, list[nn.Module]] = {}
        named: dict[int, tuple[str, nn.Parameter]] = {}
        without_call = bypassed(self.model)
        for path, module in self.model.named_modules():
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                if id(parameter) in held:
                    users.setdefault(id(parameter), []).append(module)
                    named.setdefault(id(parameter), (name, parameter))
        # A layer that has been replaced leaves its record behind under the same name: the weight tells them apart.
        known = {(layer.name, id(layer.weight)): layer for layer in chart.layers}
        layers, plain, plain_biases = [], {}, {}
        for key, modules in users.items():
            name, parameter = named[key]
            by = next((without_call[module] for module in modules if module in without_call), None)
            if why := by or why_not_rows(name, parameter, modules):
                plain[key] = why
                continue
            bias = modules[0].bias
            with_bias = isinstance(bias, nn.Parameter) and bias.requires_grad and users.get(id(bias)) == modules
            if with_bias and chart.bias_is_plain:
                plain_biases[id(bias)], with_bias = chart.bias_is_plain, False
            layer = known.pop((name, key), None)
            if layer is None or layer.modules != modules or layer.with_bias != with_bias:
                layer = chart.sums(name, modules, with_bias)
            layers.append(layer)
        for layer in layers:
            plain.pop(id(layer.bias), None)
        plain.update(plain_biases)
        refuse_shards(type(self).__name__, self.model, layers, chart.process_group if chart.synchronize else None)
        fresh = {layer.name for layer in layers} - {layer.name for layer in chart.layers if layer in layers}
        chart.measured = {name: value for name, value in chart.measured.items() if name not in fresh}
        chart.layers, chart.plain = layers, {named[key][0]: why for key, why in plain.items()}


def _sum_over_processes(layers: Sequence[InputSums], processes: Processes) -> None:
    """Add up what is pending over processes."""
    if not layers:
        return
    # Counts first and for all layers, so that every process takes part in the same sums.
    counts = torch.tensor([layer.pending_rows for layer in layers], device=layers[0].weight.device)
    add_up([counts], processes.group)
    blocks: list[Tensor] = []
    for layer, count in zip(layers, counts.tolist(), strict=True):
        if count:
            layer.pending = layer.no_rows() if layer.pending is None else layer.pending
            blocks += layer.pending
            layer.pending_rows = count
    add_up(blocks, processes.group)


def refuse_no_count(name: str, **options: int | None) -> None:
    """Raise a ValueError if one of an optimizer's options is neither None nor an integer of at least 1."""
    for option, number in options.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}: {option} is {number}; it must be an integer of at least 1.")
