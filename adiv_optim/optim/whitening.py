"""The coordinates in which the inputs of layers are white, and the way there and back."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from ..checkpoint import ANYTHING, COUNT, check
from .coordinates import Chart, Map
from .covariance import InputCovariance
from .roots import Factor, Spectrum, Whole, low_rank_roots, roots


class Whitening(Map):
    r"""W~' = W~ R⁻¹ and G~' = G~ R for one weight, with its bias as a last column.

    Args:
        covariance: whose layer it is.
        both: R and R⁻¹ of every block.
        keep_norm: give the mapped step the Frobenius norm that it had in the new coordinates.
    """

    def __init__(self, covariance: InputCovariance, both: list[tuple[Factor, Factor]], keep_norm: bool) -> None:
        self.keep_norm, self.groups, self.blocks = keep_norm, covariance.groups, covariance.blocks
        self.dtype = covariance.dtype
        self.parameters = [p for p in (covariance.weight, covariance.bias) if p is not None]
        self.inverse_roots, self.roots = zip(*both, strict=True)

    def enter(self) -> None:
        """Write parameters and gradients in the new coordinates."""
        self.gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.saved = [p.detach().clone() for p in self.parameters]
        mapped = self._times(self.inverse_roots, [self._matrix(gradient) for gradient in self.gradients])
        there = self._times(self.roots, [self._matrix(value) for value in self.saved])
        # Fused optimizers read a gradient as if it were laid out as its parameter is, which the old one was.
        new = [
            torch.empty_like(old).copy_(gradient.reshape(old.shape))
            for old, gradient in zip(self.gradients, mapped, strict=True)
        ]
        for parameter, gradient in zip(self.parameters, new, strict=True):
            parameter.grad = gradient
        for parameter, value in zip(self.parameters, there, strict=True):
            parameter.copy_(value.reshape(parameter.shape))
        # What the parameter holds is rounded to its own precision.
        self.start = [
            self._matrix(p).clone() if p.dtype != v.dtype else v for p, v in zip(self.parameters, there, strict=True)
        ]

    def leave(self) -> None:
        """Give the weights what they were, and the step that was taken, mapped back."""
        moved = [self._matrix(p) - start for p, start in zip(self.parameters, self.start, strict=True)]
        step = self._times(self.inverse_roots, moved)
        if self.keep_norm:
            before, after = _norm(moved), _norm(step)
            ratio = torch.where(after > 0, before / after, 1.0)
            step = [part.mul_(ratio) for part in step]
        for parameter, value, change, gradient in zip(self.parameters, self.saved, step, self.gradients, strict=True):
            change = change.reshape(parameter.shape)
            # Adding zero would make +0 of -0.
            parameter.copy_(torch.where(change == 0, value, value + change))
            parameter.grad = gradient
        del self.saved, self.start, self.gradients

    def _matrix(self, part: Tensor) -> Tensor:
        """A weight as (outputs, features), a bias as (outputs, 1), in the precision of the roots; groups in front."""
        shape = (self.groups, -1) if self.groups > 1 else (-1,)
        columns = part[0].numel() if part.dim() > 1 else 1
        return part.detach().reshape(*shape, columns).to(self.dtype)

    def _times(self, factors: tuple[Factor, ...], parts: list[Tensor]) -> list[Tensor]:
        """[W, b] times a root, block by block."""
        weight, bias = parts if len(parts) == 2 else (parts[0], None)
        columns = [weight] if len(self.blocks) == 1 else [weight[..., block] for block in self.blocks]
        *products, (last, bias) = [
            factor.right_multiply(part, bias if number == len(factors) - 1 else None)
            for number, (factor, part) in enumerate(zip(factors, columns, strict=True))
        ]
        whole = torch.cat([*(product for product, _ in products), last], -1) if products else last
        return [whole] if bias is None else [whole, bias]


def _norm(parts: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts]))


class WhiteChart(Chart):
    """Coordinates in which the inputs of the layers of a model are white; see `Whitened` for the arguments."""

    def __init__(self, damping: float, decay: float, every: int, keep_norm: bool, root: str, synchronize: bool) -> None:
        self.damping, self.decay, self.every = damping, decay, every
        self.keep_norm, self.root, self.synchronize = keep_norm, root, synchronize
        #: What is whitened, and why everything else is not.
        self.layers: list[InputCovariance] = []
        self.plain: dict[str, str] = {}
        self.steps = 0
        self.both: dict[str, list[tuple[Factor, Factor]]] = {}

    def maps(self) -> Iterable[Map]:
        """Return one map for each weight whose inputs were seen and that has a gradient."""
        if self._due():
            if self.synchronize:
                _sum_over_processes(self.layers)
            for layer in self.layers:
                if layer.absorb(self.decay):
                    self._find_roots(layer)
        maps = []
        for layer in self.layers:
            missing = [p.grad is None for p in (layer.weight, layer.bias) if p is not None]
            if layer.name not in self.both or all(missing):
                continue
            if any(missing):
                raise ValueError(
                    f"Whitened: of {layer.name!r} and its bias only one has a gradient; what of a layer trains must be "
                    "settled when Whitened is built. Freeze first, and build it again."
                )
            maps.append(Whitening(layer, self.both[layer.name], self.keep_norm))
        return maps

    def after_step(self) -> None:
        """Count the step, and let the forward passes before the next one gather if it measures."""
        self.steps += 1
        for layer in self.layers:
            layer.armed = self._due()

    def _due(self) -> bool:
        # While the average settles it is measured at every power of two.
        return self.steps % self.every == 0 or (self.steps < self.every and self.steps & (self.steps - 1) == 0)

    def _find_roots(self, layer: InputCovariance) -> None:
        mean, size = layer.mean(), sum(layer.sizes)
        if mean is None:
            return
        traces = [block.diagonal(dim1=-2, dim2=-1).sum(-1) for block in mean]
        average = torch.stack(traces).sum(0) / size
        level = torch.where(average > 0, average, 1.0)  # a layer that has seen zeros alone keeps its own coordinates
        scale = average + self.damping * level if self.keep_norm else torch.ones_like(level)
        ridge, condition = self.damping * level / scale, size / self.damping + 1
        both: list[tuple[Factor, Factor]] = []
        for block, trace, spectrum in zip(mean, traces, layer.spectra, strict=True):
            if spectrum is None:
                inverse, root = roots(block / scale[..., None, None], ridge, self.root, condition)
                both.append((Whole(inverse), Whole(root)))
            else:
                scaled = Spectrum(spectrum.values / scale[..., None], spectrum.vectors)
                both.append(low_rank_roots(trace / scale, scaled, ridge))
        self.both[layer.name] = both

    def state_dict(self) -> dict[str, Any]:
        """Return covariances and the counter; the roots follow from them."""
        return {"steps": self.steps, "layers": {layer.name: layer.state_dict() for layer in self.layers}}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse the state of other layers."""
        wanted = {"steps": COUNT, "layers": {layer.name: ANYTHING for layer in self.layers}}
        check(state, wanted, path := "Whitened: state_dict['chart']", self.remedy)
        for layer in self.layers:
            layer.check_state_dict(state["layers"][layer.name], f"{path}['layers'][{layer.name!r}]", self.remedy)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them from a checkpoint; an empty one makes the chart forget."""
        self.steps, self.both = state.get("steps", 0), {}
        for layer in self.layers:
            layer.reset()
            if state:
                layer.load_state_dict(state["layers"][layer.name])
                self._find_roots(layer)
            layer.armed = self._due()


def _sum_over_processes(layers: list[InputCovariance]) -> None:
    """Add up what is pending over the processes of the default group, if there are any."""
    if not layers or not (distributed.is_available() and distributed.is_initialized()):
        return
    # Counts first and for all layers, so that every process takes part in the same sums.
    counts = torch.tensor([layer.pending_rows for layer in layers], device=layers[0].weight.device)
    distributed.all_reduce(counts)
    for layer, count in zip(layers, counts.tolist(), strict=True):
        if count:
            layer.pending = layer.no_rows() if layer.pending is None else layer.pending
            for block in layer.pending:
                distributed.all_reduce(block)
            layer.pending_rows = count
