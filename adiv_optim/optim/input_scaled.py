"""Optimizers whose steps are divided by the size of the inputs of every layer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._linalg import host
from .._linalg.limits import check_positive
from .._linalg.shards import local
from ..attach.checks import Skip
from ..attach.rows import patches_of
from .by_inputs import ByInputs
from .chart import Known, Map
from .checkpoint import POSITIVE, Maybe
from .input_chart import InputChart
from .processes import Processes
from .rows import features_of
from .sums import InputSums

#: s of every group of a layer.
Scales = list[float]


class InputPower(InputSums):
    """The mean square of the entries of the rows that a layer reads, for each group of a convolution."""

    def __init__(self, name: str, modules: list[nn.Module], with_bias: bool) -> None:
        super().__init__(name, modules, with_bias)
        #: How many entries a row has, those of other processes included.
        self.features: int = self.weight.shape[1] if self.cut else features_of(modules[0])

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        #: The scale that the weight was last stepped in.
        self.last: Scales | None = None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """One number for each group."""
        return [(self.groups,)]

    def sums(self, module: Any, input: Tensor, one: int = 1) -> Iterator[tuple[list[Tensor], int]]:
        """Yield the sums of squares, in which the bias has no place."""
        patches = patches_of(module, input)
        norms = patches.squared_norm().to(self.dtype)  # (N, groups, *positions)
        yield [norms.sum([0, *range(2, norms.dim())])], norms[:, 0].numel()

    def rms(self) -> Tensor:
        """The root of the mean square of an entry, for each group that has seen a row."""
        (total,) = self.total or [torch.empty(0)]
        return (total / (self.rows * self.features)).sqrt()

    def state_dict(self) -> dict[str, Any]:
        """Return the memory."""
        return {**super().state_dict(), "last": self.last}

    def wanted(self) -> dict[str, Any]:
        """What `state_dict` holds, for `checkpoint.check`."""
        return {**super().wanted(), "last": Maybe([POSITIVE] * self.groups)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the memory from a checkpoint."""
        super().load_state_dict(state)
        self.last = state["last"]


class Scaling(Map):
    """W' = W s and G' = G / s for one weight, and the step ΔW' / s; from 0 where the optimizer does not read W'.

    Args:
        layer: whose weight it is.
        start: s that the step is taken in.
        end: s that its end is written in: another one holds W' where it is.
    """

    def __init__(self, layer: InputPower, start: Scales, end: Scales) -> None:
        self.parameters = [layer.weight]
        self.start = self.end = _as_factor(layer.weight, start, layer.dtype)
        self.holds = start != end
        if self.holds:
            self.end = _as_factor(layer.weight, end, layer.dtype)
        #: `partial`, added up over processes.
        self.stepped: Tensor | None = None

    def enter(self, weights: Sequence[Tensor], known: Known) -> None:
        """Multiply the weight by s, and give it a gradient divided by it."""
        (parameter,) = self.parameters
        if parameter.grad is not None:
            mapped = torch.empty_like(parameter.grad)
            torch.div(local(parameter.grad), self.start, out=local(mapped))
            parameter.grad = mapped
        if not known.from_zero:
            local(parameter).mul_(self.start)

    def partial(self, weights: Sequence[Tensor], known: Known) -> Tensor:
        """Return whether rows held here have been stepped on."""
        self.stepped = self._step(local(weights[0]), known).any().double()[None]
        return self.stepped

    def leave(self, weights: Sequence[Tensor], known: Known) -> None:
        """Let the weight be W + ΔW' / s."""
        weight, kept = local(weights[0]), known.kept[0] if known.from_zero else 1.0
        step = self._step(weight, known)
        if self.holds:  # a weight that was not stepped on stays as it is
            stepped = step.any() if self.stepped is None else self.stepped > 0
            weight = torch.where(stepped | (kept != 1), weight * (self.start / self.end), weight)
        written = local(self.parameters[0]).detach()
        if known.from_zero and kept == 1 and isinstance(self.end, float):  # a pass over the step less
            torch.add(weight, step, alpha=1 / self.end, out=written)
        elif known.from_zero:
            torch.add(step.div_(self.end), weight, alpha=kept, out=written)
        else:  # what was set to zero, as pruning and proximal steps do, is zero here as well
            torch.where(written == 0, written, step.div_(self.end).add_(weight), out=written)

    def _step(self, weight: Tensor, known: Known) -> Tensor:
        """ΔW', -0 where there is none; where the step began at 0 the parameter itself."""
        parameter = local(self.parameters[0]).detach()
        if known.from_zero:
            return parameter
        return (weight * self.start).to(weight.dtype).sub_(parameter).neg_()  # rounded as it was then


def _as_factor(weight: Tensor, scales: Scales, dtype: torch.dtype) -> Any:
    """The factor of a weight: one number, or each group's scale at its rows."""
    if len(scales) == 1:
        return scales[0]
    factor = torch.tensor(scales, dtype=dtype, device="cpu").to(weight.device, non_blocking=True)
    return factor.repeat_interleave(len(weight) // len(scales)).view(-1, *[1] * (weight.dim() - 1))


@dataclass(eq=False, kw_only=True)
class ScaleChart(InputChart[InputPower, Scales]):
    """Coordinates in which no layer reads more than the floor; see `InputScaled` for the arguments."""

    bias_is_plain: ClassVar[str] = "a bias moves its output by its own step, whatever the layer reads"

    floor: float
    hold: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stepping: list[tuple[InputPower, Scales]] = []

    @property
    def partials(self) -> int:
        """Whether the weight has been stepped on at all."""
        return int(self.hold)

    def sums(self, name: str, modules: list[nn.Module], with_bias: bool) -> InputPower:
        """Return the sums to keep."""
        return InputPower(name, modules, with_bias)

    def measure(self, layer: InputPower) -> Scales:
        """Return s = max(floor, r) of every group."""
        return self._measured([layer])[0]

    def measure_each(self, layers: Sequence[InputPower]) -> Iterator[Scales]:
        """Yield s of every layer, with one wait for the device for all of them."""
        for layer in layers:
            layer.absorb(self.decay)
        yield from self._measured(layers)

    def _measured(self, layers: Sequence[InputPower]) -> list[Scales]:
        found = iter(host.read(*(layer.rms() for layer in layers)))
        return [[max(self.floor, rms) for rms in islice(found, layer.groups)] for layer in layers]

    def maps(self) -> Iterable[Map]:
        """Return the maps of this step, forgetting those of one that failed."""
        self._stepping = []
        return super().maps()

    def map(self, layer: InputPower, measured: Scales) -> Map | None:
        """Return the layer's `Scaling`, or None where it would change nothing."""
        start = layer.last or measured if self.hold else measured
        self._stepping.append((layer, measured))
        return None if {*start, *measured} == {1.0} else Scaling(layer, start, measured)

    def after_step(self) -> None:
        """Remember the scales that the weights now stand in."""
        for layer, scales in self._stepping:
            layer.last = scales if self.hold else None
        super().after_step()

    def how(self, layer: InputPower, measured: Scales | None) -> str:
        """Say what the layer reads and what its steps are divided by."""
        if measured is None:
            return "nothing measured yet"
        return f"divided by {_range(measured)}, input RMS {_range(host.read(layer.rms()))}"

    def metrics(self) -> dict[str, float]:
        """Return what was measured last."""
        scales = [scale for found in self.measured.values() for scale in found]
        return {"layers_measured": len(self.measured), "largest_scale": max(scales, default=1.0)}


def _range(numbers: list[float]) -> str:
    return f"{min(numbers):.3g}" + (f" to {max(numbers):.3g}" if len(numbers) > 1 else "")


class InputScaled(ByInputs):
    r"""Let any optimizer step in coordinates in which no layer's inputs have an RMS above 1.

    With r the running root mean square of the entries of a layer's rows (samples, tokens or patches), and
    s = max(floor, r), the optimizer sees

    .. math:: W' = W s, \qquad G' = G / s

    and its step is added to the weight as ΔW' / s; the bias takes the plain step. It divides the step of an optimizer
    whose steps have a size of their own (Adam, Muon) by s, and that of SGD by s². A step ΔW moves the layer's outputs
    by ΔW x: with Adam and Muon in proportion to |x|, with SGD, whose gradient has another x in it, in proportion
    to |x|². So steps move the outputs as far as if a normaliser stood before the layer, and the forward pass has none.
    It is `Proportional` where such optimizers cannot undo it, by layer instead of by row.

    Where every layer reads inputs of an RMS of at most the floor's 1, as behind normalisers, the optimizer's steps stay
    as they are, bit for bit.

    Goes on the layers that `Whitened` goes on, gathers in the forward pass as it does, counts micro-batches, processes
    and dropped gradients as it does, and is measured when it is. Groups of a convolution each have an s.

    **Costs** one reduction of a layer's input at a measurement, and a few passes over the weights whose s is not 1 per
    step. Memory, while the optimizer steps: a copy of those weights and of their gradients.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS that reads only p and p.grad.
        model: the model.
        every: steps between two measurements.
        decay: how much the average of earlier measurements counts at each new one; 0 is the present batch alone.
        floor: the least s. At 1 steps are never made larger; below it, those of layers that read small inputs are.
        hold: keep W' and not W when s is measured anew, so that a layer whose inputs grow has its weight shrunk by as
            much. What the network computes then moves a little at each measurement.
        synchronize: add up over the processes of torch.distributed.
        process_group: which processes those are, as for `Whitened`.
        skip: paths of modules and module types to leave alone, as for `attach`.

    Raises:
        TypeError: not an optimizer, or LBFGS.
        ValueError: nothing to scale, another wrapper of coordinates inside, a setting out of its range, parameters
            without a shape yet, or sharded otherwise than by rows.

    Example:
        >>> import torch
        >>> from adiv_optim import InputScaled
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> opt = InputScaled(torch.optim.Adam(model.parameters(), lr=0.1), model)
        >>> x = torch.full((1, 4), 5.0)
        >>> before = model(x)
        >>> before.sum().backward()
        >>> opt.step()
        >>> round(before.item() - model(x).item(), 4)  # 0.1 for each of four entries, whatever their size
        0.4
        >>> print(opt.coverage())
        1 of 1 parameters are treated, 100.0% of 4 elements
        weight: divided by 5, input RMS 5
    """

    chart: ScaleChart

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        every: int = 10,
        decay: float = 0.9,
        floor: float = 1.0,
        hold: bool = False,
        synchronize: bool = True,
        process_group: Any = None,
        skip: Skip = (),
    ) -> None:
        check_positive("InputScaled", floor=floor)
        chart = ScaleChart(
            every=every, decay=decay, floor=floor, hold=hold, synchronize=synchronize,
            process_group=Processes("InputScaled", process_group), skip=skip,
        )  # fmt: skip
        super().__init__(optimizer, model, chart)
