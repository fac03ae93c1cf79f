"""Methods that multiply by a factor of every layer's input covariance, which one process finds for all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn

from .._linalg import host
from .._linalg.roots import Factor, NoRootError, Whole
from .._linalg.shards import Group, add_up, cut_of
from .eligible_layers import as_matrix, from_matrix
from .input_hooks import LayerInputs
from .input_method import InputMethod
from .second_moments import Covariance, SketchedCovariance, precision
from .snapshot import Transform


class RightMultiplication(Transform):
    r"""G~' = G~ R and W~' = W~ R⁻¹ for one weight, with its bias as a last column, and ΔW~ = ΔW~' R.

    Args:
        layer: whose parameters these are.
        factors: R, block by block.
        moves_weights: whether weights and steps are mapped, or the gradients alone.
        graft_norm: note the norms of steps before and after, of weight and bias.
    """

    def __init__(
        self, layer: LayerInputs, factors: Sequence[Factor], moves_weights: bool = True, graft_norm: bool = False
    ) -> None:
        assert isinstance(layer.moments, Covariance)
        self.parameters, self.module, self.blocks = layer.parameters, layer.modules[0], layer.moments.blocks
        self.factors, self.dtype = factors, precision(layer.weight)
        self.moves_weights, self.graft_norm = moves_weights, graft_norm  # type: ignore[misc]
        self.norms: list[Tensor] = []

    def gradients(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return G~ R."""
        return self._multiply(self.factors, self._matrices(gradients))

    def weights(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return W~ R⁻¹."""
        return self._multiply([factor.inverse for factor in self.factors], self._matrices(weights))

    def back(self, steps: list[Tensor]) -> Sequence[Tensor]:
        """Return ΔW~' R."""
        matrices = self._matrices(steps)
        before = [torch.linalg.vector_norm(part) for part in matrices if self.graft_norm]
        mapped = self._multiply(self.factors, matrices, overwrite=True)
        self.norms = before + [torch.linalg.vector_norm(part) for part in mapped if self.graft_norm]
        return mapped

    def _matrices(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [as_matrix(self.module, part, self.dtype) for part in parts]

    def _multiply(self, factors: Sequence[Factor], parts: list[Tensor], overwrite: bool = False) -> list[Tensor]:
        """[W, b] times a matrix, block by block."""
        weight, bias = parts if len(parts) == 2 else (parts[0], None)
        columns = [weight] if len(self.blocks) == 1 else [weight[..., block] for block in self.blocks]
        *products, (last, bias) = [
            factor.right_multiply(part, bias if number == len(factors) - 1 else None, overwrite)
            for number, (factor, part) in enumerate(zip(factors, columns, strict=True))
        ]
        whole = torch.cat([*(product for product, _ in products), last], -1) if products else last
        found = [whole] if bias is None else [whole, bias]
        return [from_matrix(self.module, part, p) for part, p in zip(found, self.parameters, strict=True)]


@dataclass(eq=False, kw_only=True)
class CovarianceMethod(InputMethod):
    """A method that factorises each layer's covariance, block by block.

    Processes that add up their rows have the same covariances. Each of them factorises those that are dealt to it, and
    sends what comes of them to the others.

    Args:
        damping: λ in units of the mean eigenvalue.
        max_dim: how many columns of a layer are one block at most.
        max_rows: how many rows of a forward pass count at most.
    """

    #: What is done to a layer, in a word.
    verb: ClassVar[str]
    shaping: ClassVar[Sequence[str]] = ("max_dim",)

    damping: float
    max_dim: int | None
    max_rows: int | None

    def moments(self, module: nn.Module, with_bias: bool) -> Covariance:
        """Return the covariance to keep."""
        return Covariance(module, with_bias, self.max_dim, self.max_rows)

    def how(self, layer: LayerInputs, measured: Sequence[Factor] | None) -> str:
        """Say how many columns are told apart."""
        cut = cut_of(layer.weight)
        here = " of this process" * bool(cut is not None and cut.dim)
        return f"{self.verb if measured else 'nothing measured yet'}, {layer.moments}{here}"

    def measure_each(self, layers: Sequence[LayerInputs]) -> Iterator[Any]:
        """Measure the layers that are dealt to this process, and yield what all processes have found."""
        group = self.process_group.group
        count = distributed.get_world_size(group) if self.together else 1
        if count == 1:
            yield from super().measure_each(layers)
            return
        # The leading eigenvectors cost less to find than to wait for.
        heavy = [layer for layer in layers if not isinstance(layer.moments, SketchedCovariance)]
        mine, owner = distributed.get_rank(group), deal(heavy, count)
        own = {layer: self.measure_now(layer) for layer in heavy if owner[layer] == mine}
        for layer in layers:
            if layer not in owner:
                yield self.measure_now(layer)
                continue
            if owner[layer] != mine:
                self.absorb(layer)
            yield _sent(layer, own.get(layer), owner[layer], group)
        _agree([layer for layer in layers if layer not in owner], group)


def _sent(layer: LayerInputs, found: Any, owner: int, group: Group) -> list[Factor] | NoRootError:
    """Send what one process has found to all others."""
    moments: Any = layer.moments
    stack = (layer.moments.groups,) if layer.moments.groups > 1 else ()
    shapes = [torch.Size((*stack, size, size)) for size in moments.sizes]
    total = sum(shape.numel() for shape in shapes)
    numbers = torch.empty(total, dtype=precision(layer.weight), device=layer.weight.device)
    if isinstance(found, NoRootError):
        numbers.fill_(torch.nan)
    elif found is not None:
        torch.cat([factor.matrix.flatten() for factor in found], out=numbers)
    distributed.broadcast(numbers, group=group, group_src=owner)
    if not all(host.read(numbers[0].isfinite())):
        return NoRootError(f"no root of {moments} found by the process that they were dealt to")
    parts = zip(numbers.split([shape.numel() for shape in shapes]), shapes, strict=True)
    return [Whole(part.view(shape)) for part, shape in parts]


def _agree(layers: Sequence[LayerInputs], group: Group) -> None:
    """Let all processes have the eigenvectors of the first.

    Others may differ by a sign, or by rounding that nearly equal eigenvalues make large, and the products with them of
    different processes could not be added up.
    """
    first = distributed.get_rank(group) == 0
    for layer in layers:  # made anew, not in place: transforms hold the old ones
        layer.memory = [tensor.clone() if first else torch.zeros_like(tensor) for tensor in layer.memory]
    add_up([tensor for layer in layers for tensor in layer.memory], group)


def deal(layers: Sequence[LayerInputs], count: int) -> dict[LayerInputs, int]:
    """Which of so many processes factorises which layer: the dearest first, each to the one with the least to do."""
    loads, owner = [0] * count, {}
    every: list[Any] = [layer.moments for layer in layers]
    work = [moments.groups * sum(n**3 for n in moments.sizes) for moments in every]
    for place in sorted(range(len(layers)), key=lambda place: (-work[place], place)):
        least = loads.index(min(loads))
        loads[least] += work[place]
        owner[layers[place]] = least
    return owner
