"""Charts that measure the inputs of a model's layers: when, over which processes, and what they remember."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from .._linalg import host
from .._linalg.roots import NoRootError
from .._linalg.shards import add_up, cut_of
from ..attach.checks import Skip
from ..attach.coverage import UNCALLED, Coverage, uncalled_words, warn
from .chart import Chart, Known, Map
from .checkpoint import ANYTHING, COUNT, DICT, NAMES, check
from .processes import Processes
from .rows import FROZEN
from .sums import InputSums

#: So many measurements in a row without a row of a layer that has gradients are worth a word.
_MISSES = 10
#: Of such a layer.
MISSED = f"no rows in the last {_MISSES} measurements"
#: Squares of whole numbers times it have remainders that are spread evenly and keep to no period (Weyl).
_GOLDEN = (5**0.5 - 1) / 2

#: What is kept of a layer's inputs, and what a measurement makes of it.
Sums = TypeVar("Sums", bound=InputSums)
Measured = TypeVar("Measured")


@dataclass(eq=False, kw_only=True)
class InputChart(Chart, Generic[Sums, Measured]):
    """A chart that measures the inputs of a model's layers.

    Args:
        every: steps between two measurements.
        decay: how much the average of earlier measurements counts at each new one.
        synchronize: add up over processes.
        process_group: which processes those are.
        skip: modules to leave alone.
    """

    #: Why a bias is not treated with its weight, or "" if it is.
    bias_is_plain: ClassVar[str] = ""

    every: int
    decay: float
    synchronize: bool
    process_group: Processes
    skip: Skip

    def __post_init__(self) -> None:
        if not isinstance(self.skip, str):
            self.skip = tuple(self.skip)
        #: The layers that are measured, and by name why other parameters are plain.
        self.layers: list[Sums] = []
        self.plain: dict[str, str] = {}
        #: By name, parameters that are plain for no other reason than that they do not train now.
        self.frozen: dict[str, nn.Parameter] = {}
        self.steps = 0
        #: Whether all processes see the same rows, so that there is nothing to add up.
        self.alone = False
        #: Whether what is remembered has been loaded since the last step, by itself.
        self.loaded = False
        self.measured: dict[str, Measured] = {}
        #: Names of layers that have been warned of.
        self.told: set[str] = set()
        #: The part of a checkpoint for layers that are frozen now, for when they train again.
        self.aside: dict[str, Any] = {}
        #: By layer, how often its covariance could not be factorised; what was measured before then stays in use.
        self.failures: Counter[str] = Counter()
        #: By layer, how often rows were dropped because their sums held NaN or inf.
        self.spoiled: Counter[str] = Counter()

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
            for layer in self.layers:
                if layer.dropped and not layer.has_gradient():  # not in the pass after zero_grad
                    layer.drop()
            self.gather()
            self.measure_all()
        maps = []
        for layer in self.layers:
            if layer.name not in self.measured or layer.parametrized or all(p.grad is None for p in layer.parameters):
                continue
            found = self.map(layer, self.measured[layer.name])
            maps += [found] if found is not None else []
        return maps

    @property
    def together(self) -> bool:
        """Whether other processes have rows to add."""
        return self.synchronize and self.process_group.several and not self.alone

    def gather(self) -> None:
        """Add up what layers have seen since the last time over processes."""
        if self.together and self.layers:
            _sum_over_processes(self.layers, self.counts(), self.process_group)
        _sum_over_columns(self.layers)

    def counts(self) -> list[int]:
        """How many rows all processes have seen of each layer that has sums of its own."""
        counts = torch.tensor([layer.pending_rows for layer in self.layers], device=self.layers[0].weight.device)
        add_up([counts], self.process_group.group)
        return counts.tolist()

    def settle(self, maps: Mapping[Map, tuple[Sequence[Tensor], Known]]) -> None:
        """Add up what maps know of the rows held here over the processes that hold the others, for all layers at once.

        Every sharded layer has its place, so that all processes take part in the same sum whatever they have measured.
        """
        if not self.partials:
            return
        sums: dict[Any, list[Tensor]] = {}
        by_weight = {id(map_.parameters[0]): map_ for map_ in maps}
        for layer in self.layers:
            if (cut := cut_of(layer.weight)) is not None:
                found = by_weight.get(id(layer.weight))
                none = torch.zeros(self.partials, dtype=torch.float64, device=layer.weight.device)
                sums.setdefault(cut.group, []).append(none if found is None else found.partial(*maps[found]))
        for group, partials in sums.items():
            add_up(partials, group)

    def measure_each(self, layers: Sequence[Sums]) -> Iterator[Measured | NoRootError]:
        """Let what layers have seen into their averages, and measure these one by one, or yield why that fails."""
        for layer in layers:
            yield self.measure_now(layer)

    def measure_now(self, layer: Sums) -> Measured | NoRootError:
        """Let what a layer has seen into its average, and measure it, or return why that fails."""
        try:
            layer.absorb(self.decay)
            return self.measure(layer)
        except NoRootError as error:
            return error

    def measure_all(self) -> None:
        """Measure every layer that has seen anything since the last time."""
        for layer in self.layers:
            layer.unseen = 0 if layer.seen or layer.weight.grad is None else layer.unseen + 1
            if layer.unseen == _MISSES and not layer.has_gradient():
                layer.unseen = 0
        seen = [layer for layer in self.layers if layer.pending_rows]
        finite = {layer for layer, good in zip(seen, host.read(*(each.finite() for each in seen)), strict=True) if good}
        for layer in self.layers:
            if layer not in finite:
                if layer.pending_rows:
                    self.spoiled[layer.name] += 1
                layer.forget_pending()
        whole = [layer for layer in seen if layer in finite]
        for layer, found in zip(whole, self.measure_each(whole), strict=True):
            if isinstance(found, NoRootError):
                self._failed(layer, found)
            else:
                self.measured[layer.name] = found

    def _failed(self, layer: Sums, error: NoRootError) -> None:
        self.failures[layer.name] += 1
        if self.failures.total() == 1:
            warn(
                f"{layer.name}: {error}; the layer keeps what was measured before, or takes plain steps. Further "
                "failures are counted in coverage() and metrics() without a word; a greater damping may help."
            )

    def after_step(self) -> None:
        """Count the step, and let the forward passes before the next one gather if it measures."""
        self.steps += 1
        self.loaded = False
        for layer in self.layers:
            layer.steps += 1
        self._arm()
        missed = [layer.name for layer in self.layers if self._missed(layer) and layer.name not in self.told]
        if missed:
            self.told.update(missed)
            warn(
                f"{', '.join(missed[:4])}{' and others' * (len(missed) > 4)}: gradients, but {MISSED}. They keep what "
                f"was measured before, or take plain steps. One step in {self.every} measures, and rows count where "
                "gradients are enabled: choose a smaller `every`, or name these layers in skip."
            )

    def _arm(self) -> None:
        for layer in self.layers:
            layer.armed, layer.turn = self._due(), self.steps

    def _due(self) -> bool:
        # While the average settles it is measured at every power of two; then once in each round of `every` steps, at
        # a place that no period of the training keeps to, as of a critic with real and generated samples in turns.
        number, place = divmod(self.steps, self.every)
        if number == 0:
            return place & (place - 1) == 0
        return place == int(self.every * (number * number * _GOLDEN % 1))

    def coverage(self) -> Coverage:
        """Say of every trainable parameter how it is treated, or why it is not."""
        treated: dict[str, str] = {}
        never_seen: dict[str, str] = {}
        skipped = dict(self.plain)
        for layer in self.layers:
            measured = self.measured.get(layer.name)
            why = "" if layer.weight.requires_grad else FROZEN  # for a while: it was to be treated
            why = why or (UNCALLED if self._uncalled(layer) else "")
            found = skipped if why else never_seen if measured is None else treated
            missed = f", {MISSED}" * self._missed(layer)
            how = why or f"{self.how(layer, measured)}{missed}{self.remark(layer)}"
            found[layer.present_name] = how
            if layer.with_bias:
                first = "" if measured is None else f"{how.partition(',')[0]}, "
                own = how if found is skipped else f"{first}with its weight"
                found[layer.name.removesuffix("weight") + "bias"] = own
        return Coverage(treated, skipped, never_seen)

    def measured_parameters(self) -> set[int]:
        """The weights and biases of its layers."""
        return {id(parameter) for layer in self.layers for parameter in layer.parameters}

    def _uncalled(self, layer: Sums) -> bool:
        """Whether its weight has a gradient, though it has not been called since it was found."""
        return layer.steps >= 2 and not layer.called and layer.name not in self.measured and layer.has_gradient()

    def _missed(self, layer: Sums) -> bool:
        """Whether it has had gradients for some time, but no rows before steps that measure."""
        return layer.called and layer.unseen >= _MISSES

    def remark(self, layer: Sums) -> str:
        """Say what else there is to say of a layer."""
        failed, spoiled = self.failures[layer.name], self.spoiled[layer.name]
        words = f", {failed} factorisations failed" if failed else ""
        return words + (f", rows dropped {spoiled} times: their squares held NaN or inf" if spoiled else "")

    def why_inactive(self) -> str:
        """Say why no layer has been measured, or why some have not whose weights have gradients."""
        if self.measured:
            uncalled = [layer.name for layer in self.layers if self._uncalled(layer)]
            return f"those with {uncalled_words(uncalled)}" if uncalled else ""
        if self.failures:
            return "no covariance could be factorised; choose a greater damping."
        if self.spoiled:
            return "the squares of what its layers read held NaN or inf; look for the first layer that returns them."
        return (
            "no layer has seen a row. Train with gradients enabled, and wrap the optimizer before the first call of a "
            "model that torch.compile has compiled, which would not see the hooks."
        )

    def metrics(self) -> dict[str, float]:
        """Return what was measured last."""
        return {"layers_measured": len(self.measured), "failed_factorisations": sum(self.failures.values())}

    def state_dict(self) -> dict[str, Any]:
        """Return covariances and the counter; what is made of them follows from them."""
        layers = {layer.name: layer.state_dict() for layer in self.layers}
        frozen = [name for name in self.frozen if name not in self.aside]
        return {"steps": self.steps, "layers": {**self.aside, **layers}, **({"frozen": frozen} if frozen else {})}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse the state of other layers, but for those that are frozen, or were when it was saved."""
        path, names = "state_dict['chart']", {layer.name for layer in self.layers}
        then = {"frozen": NAMES} if isinstance(state, Mapping) and "frozen" in state else {}
        check(state, {"steps": COUNT, "layers": DICT, **then}, path, self.remedy)
        found = state["layers"].keys()
        lacking = names.intersection(state.get("frozen", ())) - found
        wanted = dict.fromkeys((names - lacking) | (found & self.frozen.keys()), ANYTHING)
        check(state["layers"], wanted, f"{path}['layers']", self.remedy)
        for layer in self.layers:
            if layer.name in found:
                layer.check_state_dict(state["layers"][layer.name], f"{path}['layers'][{layer.name!r}]", self.remedy)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them from a checkpoint; an empty one makes the chart forget."""
        if self.loaded and not state:
            return  # torch.distributed.checkpoint loads averages and the optimizer's own state one by one
        self.steps, self.measured, self.failures, self.spoiled = state.get("steps", 0), {}, Counter(), Counter()
        self.aside = dict(state.get("layers", {}))
        for layer in self.layers:
            layer.reset()
            self.recall(layer)
        self._arm()

    def recall(self, layer: Sums) -> None:
        """Let a layer remember what is kept aside of it, unless its bias trained then and not now, or conversely."""
        part = self.aside.pop(layer.name, None)
        if part is None:
            return
        try:
            layer.check_state_dict(part, layer.name, self.remedy)
        except ValueError:
            return
        layer.load_state_dict(part)
        if layer.total is not None:
            try:
                self.measured[layer.name] = self.measure(layer)
            except NoRootError:
                self.failures[layer.name] = 1


def _sum_over_processes(layers: Sequence[InputSums], counts: Sequence[int], processes: Processes) -> None:
    """Add up what is pending over processes, for all layers that any of them has seen, so that all take part."""
    blocks: list[Tensor] = []
    for layer, count in zip(layers, counts, strict=True):
        if count:
            layer.pending = layer.no_rows() if layer.pending is None else layer.pending
            blocks += layer.pending
            layer.pending_rows = count
    add_up(blocks, processes.group)


def _sum_over_columns(layers: Sequence[InputSums]) -> None:
    """Add what is pending of all columns of a layer up over the processes that hold the others.

    They see the same rows: where one has seen any, all have.
    """
    sums: dict[Any, list[Tensor]] = {}
    for layer in layers:
        if layer.cut is not None and layer.pending is not None:
            sums.setdefault(layer.cut.group, []).append(layer.pending[-1])
    for group, parts in sums.items():
        add_up(parts, group)
