"""Methods that measure the inputs of a model's layers: when, over which processes, and what they remember."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from .._linalg import host
from .._linalg.roots import NoRootError
from .._linalg.shards import DataParallelGroup
from ..attach.checks import Skip
from ..attach.coverage import UNCALLED, Coverage, uncalled_words, warn
from .input_hooks import LayerInputs
from .reparametrized import Method
from .second_moments import Moments, add_up_rows
from .wrapper import OURS

#: Squares of whole numbers times it have remainders that are spread evenly and keep to no period (Weyl).
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(eq=False, kw_only=True)
class InputMethod(Method):
    """A method that measures the inputs of a model's layers; see `Whitened` for the arguments."""

    #: Why a bias is not treated with its weight, or "" if it is.
    bias_is_plain: ClassVar[str] = ""
    prefix: ClassVar[str] = f"{OURS}inputs."

    every: int
    decay: float
    process_group: DataParallelGroup
    skip: Skip

    def __post_init__(self) -> None:
        if not isinstance(self.skip, str):
            self.skip = tuple(self.skip)
        #: The layers that are measured, and by name why other parameters are plain.
        self.layers: list[LayerInputs] = []
        self.plain: dict[str, str] = {}
        #: The optimizer's parameters as layers were last looked for, where they were and whether they trained.
        self.trained: list[Any] = []
        #: By layer, what was made of its average.
        self.measured: dict[str, Any] = {}
        #: By layer, how often its covariance could not be factorised, and rows were dropped for sums with NaN or inf.
        self.failures, self.spoiled = Counter[str](), Counter[str]()

    def settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @abstractmethod
    def moments(self, module: nn.Module, with_bias: bool) -> Moments:
        """Return what is to be kept of a layer's inputs."""

    @abstractmethod
    def measure(self, layer: LayerInputs) -> Any:
        """Make of a layer's average what its transforms need.

        Raises:
            NoRootError: it cannot be factorised.
        """

    @abstractmethod
    def how(self, layer: LayerInputs, measured: Any) -> str:
        """Say in words how a layer is treated, or would be once something is measured."""

    def moving(self) -> list[LayerInputs]:
        """Measure if that is due, and return the layers whose inputs were seen and whose parameters have gradients."""
        self._begin_anew()
        if self.due():
            self._measure()
        return [layer for layer in self.layers if layer.name in self.measured and layer.moves]

    def _begin_anew(self) -> None:
        """Forget what was measured of layers whose weights have other shapes since."""
        changed = []
        for layer in self.layers:
            if layer.old_shape is not None or layer.begin_anew():
                changed.append(f"{layer.name} from {tuple(layer.old_shape or ())} to {tuple(layer.shape)}")
                layer.old_shape = None
                self.measured.pop(layer.name, None)
        if changed:
            warn(
                f"the shapes of weights have changed: {', '.join(changed)}; what their layers read is measured anew, "
                "and until then they take plain steps."
            )

    def _measure(self) -> None:
        """Let the rows that count into the averages and measure these, or leave all as it was if that is cut short."""
        before = [(vars(layer), dict(vars(layer))) for layer in self.layers]
        try:
            same, spoiled = self._sums()
            alone = [layer for layer in same if same[layer] is layer]
            found = dict(zip(alone, self.measure_each(alone), strict=True))
        except BaseException:
            for attributes, old in before:
                attributes.update(old)
            raise
        for layer in spoiled:
            self.spoiled[layer.name] += 1
            layer.forget()
        errors: dict[str, NoRootError] = {}
        for layer, other in same.items():
            layer.memory, layer.rows = other.memory, other.rows
            layer.forget()
            if isinstance(found[other], NoRootError):
                errors[layer.name] = found[other]
            else:
                self.measured[layer.name] = found[other]
        self._failed(errors)

    def _sums(self) -> tuple[dict[LayerInputs, LayerInputs], list[LayerInputs]]:
        """By layer the first one that has the same sums, and the layers whose sums are not finite."""
        for layer in self.layers:
            layer.settle()
        if self.process_group.several and self.layers:
            add_up_rows(self.layers, self.process_group.group)
        for layer in self.layers:
            layer.missed = 0 if layer.pending_rows or layer.weight.grad is None else layer.missed + 1
        seen = [layer for layer in self.layers if layer.pending_rows]
        finite = dict(zip(seen, host.read(*(layer.finite() for layer in seen)), strict=True))
        first: dict[int, LayerInputs] = {}
        same = {layer: first.setdefault(id(layer.pending), layer) for layer in seen if finite[layer]}
        return same, [layer for layer in seen if not finite[layer]]

    def measure_each(self, layers: Sequence[LayerInputs]) -> Iterator[Any]:
        """Let what layers have seen into their averages and measure these, or yield the NoRootError of each."""
        for layer in layers:
            yield self.measure_now(layer)

    def measure_now(self, layer: LayerInputs) -> Any:
        """Let what a layer has seen into its average and measure it, or return why that fails."""
        try:
            layer.absorb(self.decay)
            return self.measure(layer)
        except NoRootError as error:
            return error

    def _failed(self, errors: Mapping[str, NoRootError]) -> None:
        told = self.failures.total() > 0
        self.failures.update(errors.keys())
        if errors and not told:
            name, error = next(iter(errors.items()))
            warn(
                f"{name}: {error}; the layer keeps what was measured before, or takes plain steps. Further "
                "failures are counted in coverage() and metrics() without a word; a greater damping may help."
            )

    def after_step(self) -> None:
        """Count the step, and let the forward passes before the next one gather if it measures."""
        super().after_step()
        self._arm()

    def _arm(self) -> None:
        for layer in self.layers:
            layer.armed, layer.turn = self.due(), self.steps

    def due(self) -> bool:
        """Whether the next step measures."""
        # While the average settles it is measured at every power of two; then once in each round of `every` steps, at
        # a place that no period of the training keeps to, as of a critic with real and generated samples in turns.
        number, place = divmod(self.steps, self.every)
        if number == 0:
            return place & (place - 1) == 0
        return place == int(self.every * (number * number * _GOLDEN % 1))

    def coverage(self) -> Coverage:
        treated: dict[str, str] = {}
        never_seen: dict[str, str] = {}
        skipped = dict(self.plain)
        for layer in self.layers:
            measured = self.measured.get(layer.name)
            why = UNCALLED * self._uncalled(layer) if layer.weight.requires_grad else "frozen"
            why = why or "parametrized" * layer.is_computed
            found = skipped if why else never_seen if measured is None else treated
            how = why or f"{self.how(layer, measured)}{self._remark(layer)}"
            found[layer.present_name] = how
            if layer.with_bias:
                first = "" if measured is None else f"{how.partition(',')[0]}, "
                own = how if found is skipped else f"{first}with its weight"
                found[layer.name.removesuffix("weight") + "bias"] = own
        return Coverage(treated, skipped, never_seen)

    def treated_parameters(self) -> set[int]:
        """The weights and biases of its layers."""
        return {id(parameter) for layer in self.layers for parameter in layer.parameters}

    def _uncalled(self, layer: LayerInputs) -> bool:
        """Whether its weight has a gradient, though it has not been called since it was found."""
        return layer.missed >= 2 and not layer.called and layer.name not in self.measured and layer.has_gradient()

    def _first_with_memory_of(self, layer: LayerInputs) -> LayerInputs:
        return next(each for each in self.layers if each.memory is layer.memory)

    def _remark(self, layer: LayerInputs) -> str:
        first = self._first_with_memory_of(layer)
        words = "" if first is layer else f", one average with {first.name}"
        failed, spoiled = self.failures[layer.name], self.spoiled[layer.name]
        words += f", {failed} factorisations failed" if failed else ""
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
        return bool(self.layers) * (
            "no layer has seen a row. Train with gradients enabled, and wrap the optimizer before the first call of a "
            "model that torch.compile has compiled, which would not see the hooks."
        )

    def metrics(self) -> dict[str, float]:
        return {"layers_measured": len(self.measured), "failed_factorisations": sum(self.failures.values())}

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Return averages; what is made of them follows from them."""
        return {layer.weight: self.layer_state(layer) for layer in self.layers}

    def layer_state(self, layer: LayerInputs) -> dict[str, Any]:
        """Return what is remembered of a layer."""
        alone = self._first_with_memory_of(layer) is layer
        memory = {f"{n}": tensor if alone else tensor.clone() for n, tensor in enumerate(layer.memory)}
        return {**memory, "rows": layer.rows}

    def load_layer(self, layer: LayerInputs, state: Mapping[str, Any]) -> None:
        """Take it from a checkpoint, or begin anew where that has nothing."""
        layer.memory = [
            state.get(f"{n}", zeros).to(layer.weight.device, host.wide(layer.weight))
            for n, zeros in enumerate(layer.moments.zeros(layer.weight))
        ]
        layer.rows = state.get("rows", 0.0)

    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take them from a checkpoint, and measure."""
        self.measured, self.failures, self.spoiled = {}, Counter(), Counter()
        for place, layer in enumerate(self.layers):
            layer.forget()
            self.load_layer(layer, state.get(layer.weight, {}))
            if not layer.rows:
                continue
            first = next((each for each in self.layers[:place] if layer.remembers_as(each)), layer)
            layer.memory = first.memory
            try:
                self.measured[layer.name] = self.measure(layer) if first is layer else self.measured[first.name]
            except (NoRootError, KeyError):
                self.failures[layer.name] = 1
        self._arm()
