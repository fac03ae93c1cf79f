"""Optimizers whose steps are divided by the size of the inputs of every layer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._linalg import host
from .._linalg.limits import check_positive
from .._linalg.shards import DataParallelGroup, add_up_row_shards, local
from ..attach.checks import Skip
from .by_inputs import ByInputs
from .input_hooks import LayerInputs
from .input_method import InputMethod
from .second_moments import MeanSquare
from .snapshot import Diagonal, Snapshot, Transform


@dataclass(eq=False, kw_only=True)
class ScalingMethod(InputMethod):
    """Lets an optimizer step where no layer reads more than the floor; see `InputScaled` for the arguments."""

    bias_is_plain: ClassVar[str] = "a bias moves its output by its own step, whatever the layer reads"

    floor: float
    hold: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        #: By layer the scale that its weight was last stepped in, where W' is held; and for this step that, and s.
        self.last: dict[str, float] = {}
        self._stepping: dict[str, tuple[float, float]] = {}

    def moments(self, module: nn.Module, with_bias: bool) -> MeanSquare:
        return MeanSquare(module)

    def measure(self, layer: LayerInputs) -> float:
        """Return s = max(floor, r)."""
        return self._scales([layer])[0]

    def measure_each(self, layers: Sequence[LayerInputs]) -> Iterator[float]:
        """Yield s of every layer, with one wait for the device for all of them."""
        for layer in layers:
            layer.absorb(self.decay)
        yield from self._scales(layers)

    def _scales(self, layers: Sequence[LayerInputs]) -> list[float]:
        return [max(self.floor, rms) for rms in host.read(*map(_rms, layers))]

    def transforms(self) -> Sequence[Transform]:
        """Return a `Scaling` for each layer whose inputs were seen, but for those of which it would change nothing."""
        self._stepping, found = {}, list[Transform]()
        for layer in self.moving():
            end = self.measured[layer.name]
            start = self.last.get(layer.name, end) if self.hold else end
            self._stepping[layer.name] = start, end
            if start != 1 or end != 1:
                found.append(Diagonal(layer.weight, [1 / start]))
        return found

    def rescale(self, snapshots: Sequence[Snapshot]) -> None:
        """Where W' is held and s has changed, let the weight shrink as s grows, as soon as it is stepped on.

        Rounding may leave nothing of a step, in bfloat16 mostly, which is one all the same: the gradient says so, where
        the learning rate is not 0.
        """
        changed: dict[int, str] = {}
        for layer in self.layers:
            start, end = self._stepping.get(layer.name, (1.0, 1.0))
            if start != end:
                changed[id(layer.weight)] = layer.name
        if not self.hold or not (changed or self.due()):  # all processes measure together, and take part in the sum
            return
        moving = [snapshot for snapshot in snapshots if id(snapshot.moving[0]) in changed]
        moved = {id(s.moving[0]): _is_stepped_on(s).to(host.widest(s.steps[0].device))[None] for s in moving}
        add_up_row_shards(self.layers, moved, 1)
        names = [changed[id(snapshot.moving[0])] for snapshot in moving]
        stepped = host.read(*(moved[id(snapshot.moving[0])][0] for snapshot in moving))
        for name in changed.values():
            start, end = self._stepping[name]
            self._stepping[name] = start, start  # W' is still held where the last step on it left it
            if name not in names or not stepped[names.index(name)]:
                continue
            snapshot = moving[names.index(name)]
            self._stepping[name] = start, end
            snapshot.ratio = snapshot.steps[0].new_ones(()) * (start / end)
            snapshot.keep = [snapshot.ratio * keep for keep in snapshot.keep]

    def after_step(self) -> None:
        """Remember the scales that the weights now stand in."""
        if self.hold:
            self.last |= {name: end for name, (_, end) in self._stepping.items()}
        super().after_step()

    def how(self, layer: LayerInputs, measured: float | None) -> str:
        """Say what the layer reads and what its steps are divided by."""
        if measured is None:
            return "nothing measured yet"
        return f"divided by {measured:.3g}, input RMS {_rms(layer).item():.3g}"

    def metrics(self) -> dict[str, float]:
        """Return what was measured last: the greatest s, and of each layer the RMS of its inputs."""
        layers = [layer for layer in self.layers if layer.name in self.measured]
        sizes = host.read(*map(_rms, layers))
        rms = {f"{layer.name}/input_rms": size for layer, size in zip(layers, sizes, strict=True)}
        return {"layers_measured": len(self.measured), "largest_scale": max(self.measured.values(), default=1.0), **rms}

    def layer_state(self, layer: LayerInputs) -> dict[str, Any]:
        """Return what is remembered of a layer; a scale of 0 is none yet."""
        last, device = self.last.get(layer.name, 0.0), layer.weight.device
        return {**super().layer_state(layer), "last": torch.tensor([last], dtype=host.widest(device), device=device)}

    def load_layer(self, layer: LayerInputs, state: Mapping[str, Any]) -> None:
        super().load_layer(layer, state)
        self.last.pop(layer.name, None)
        if last := float(state.get("last", 0.0)):
            self.last[layer.name] = last


def _is_stepped_on(snapshot: Snapshot) -> Tensor:
    """Whether a weight moves, or has a gradient and a learning rate, or decays; of a sharded one the part held here."""
    (step,), (gradient, *_), (keep,) = snapshot.steps, snapshot.gradients, snapshot.keep
    steps = step.any()
    if gradient is not None:
        steps = steps | (local(gradient).any() & (snapshot.rate != 0))
    return steps | (keep != 1)


def _rms(layer: LayerInputs) -> Tensor:
    moments: Any = layer.moments
    found: Tensor = moments.rms(layer.memory, layer.rows)
    return found


class InputScaled(ByInputs):
    r"""Let any optimizer step in variables in which no layer's inputs have an RMS above 1.

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

    Which layers are treated, when r is measured, and what micro-batches, processes, compilation and checkpoints mean,
    is as for `Whitened`.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS that reads only p and p.grad.
        model: the model.
        every, decay, process_group, skip: as for `Whitened`.
        floor: the least s. At 1 steps are never made larger; below it, those of layers that read small inputs are.
        hold: keep W' and not W when s is measured anew, so that a layer whose inputs grow has its weight shrunk by as
            much. What the network computes then moves a little at each measurement.

    Raises:
        TypeError, ValueError: as `Whitened`.

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

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        every: int = 10,
        decay: float = 0.9,
        floor: float = 1.0,
        hold: bool = False,
        process_group: Any = None,
        skip: Skip = (),
    ) -> None:
        check_positive("InputScaled", floor=floor)
        method = ScalingMethod(
            every=every, decay=decay, floor=floor, hold=hold,
            process_group=DataParallelGroup("InputScaled", process_group), skip=skip,
        )  # fmt: skip
        super().__init__(optimizer, model, method)
