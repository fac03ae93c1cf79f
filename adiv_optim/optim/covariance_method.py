"""Methods that multiply by a factor of every layer's input covariance, which one process finds for all."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn

from .._linalg import host
from .._linalg.roots import Factor, NoRootError, Whole, stacked
from .._linalg.shards import Group, add_up, local
from .input_hooks import LayerInputs
from .input_method import InputMethod
from .second_moments import Covariance, SketchedCovariance
from .snapshot import Transform

#: Entries of a weight up to which layers are multiplied together.
_SMALL = 2**12


class RightMultiplication(Transform):
    r"""G~' = G~ R and W~' = W~ R⁻¹ for a weight, with its bias as a last column, and ΔW~ = ΔW~' R.

    Args:
        layers: whose parameters these are: one, or several small ones of one shape, which are multiplied together.
        factors: R, block by block, of several layers in a stack.
        moves_weights: whether weights and steps are mapped, or the gradients alone.
        graft_norm: note the norms of steps before and after.
        watched: note their products too, for `metrics`.
    """

    def __init__(
        self,
        layers: Sequence[LayerInputs],
        factors: Sequence[Factor],
        moves_weights: bool = True,
        graft_norm: bool = False,
        watched: bool = False,
    ) -> None:
        first: Any = layers[0]
        self.layers, self.parameters = layers, [parameter for layer in layers for parameter in layer.parameters]
        self.count, self.layout, self.blocks = len(layers), first.layout, first.moments.blocks
        self.shapes = [local(parameter).shape for parameter in first.parameters]
        self.factors, self.copies = factors, self.count > 1
        self.moves_weights, self.graft_norm, self.watched = moves_weights, graft_norm, watched
        #: Of every layer, the norm of the step before and after, (count, 2); if watched, of each group their products,
        #: before × before, before × after and after × after, divided by the layer's outputs, (count, 3, groups).
        self.norms = self.products = torch.empty(0)

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The weight, and the bias if there is one, as matrices; of several layers in a stack."""
        if self.copies:
            parts = [torch.stack([*parts[place :: len(self.shapes)]]) for place in range(len(self.shapes))]
        return [self.layout.matrix(part, self.copies) for part in parts]

    def split(self, joined: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self.copies:
            return [self.layout.part(*pair) for pair in zip(joined, self.shapes, strict=True)]
        stacks = zip(joined, self.shapes, strict=True)
        every = [self.layout.part(matrix, (self.count, *shape), 1).unbind() for matrix, shape in stacks]
        return [part for layer in zip(*every, strict=True) for part in layer]

    def gradients(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return G~ R."""
        return self._multiply(self.factors, gradients)

    def weights(self, weights: list[Tensor]) -> list[Tensor]:
        """Return W~ R⁻¹."""
        return self._multiply([factor.inverse for factor in self.factors], weights)

    def back(self, steps: list[Tensor]) -> list[Tensor]:
        """Return ΔW~' R."""
        before = self._norms(steps)
        mapped = self._multiply(self.factors, steps, overwrite=not self.watched)
        if self.watched:
            pairs, outputs = ((steps, steps), (steps, mapped), (mapped, mapped)), steps[0][..., 0].numel() / self.count
            sums = [torch.stack([(a * b).sum((-2, -1)) for a, b in zip(*pair, strict=True)]).sum(0) for pair in pairs]
            self.products = host.double(torch.stack(sums)).div_(outputs).view(3, self.count, -1).movedim(0, 1)
        if self.graft_norm:
            # Of weight and bias, (…, 2), if there is one.
            norms = torch.stack(before + self._norms(mapped), -1).view(self.count, 2, -1)
            self.norms = norms[..., 0] if norms.shape[-1] == 1 else torch.linalg.vector_norm(norms, dim=-1)
        return mapped

    def _norms(self, parts: Sequence[Tensor]) -> list[Tensor]:
        dim = (-2, -1) if self.copies else None
        return [torch.linalg.vector_norm(part, dim=dim) for part in parts if self.graft_norm]

    def _multiply(self, factors: Sequence[Factor], parts: list[Tensor], overwrite: bool = False) -> list[Tensor]:
        """[W, b] times a matrix, block by block."""
        parts = [part.to(host.wide(part)) for part in parts]
        weight, bias = parts if len(parts) == 2 else (parts[0], None)
        columns = [weight] if len(self.blocks) == 1 else [weight[..., block] for block in self.blocks]
        *products, (last, bias) = [
            factor.right_multiply(part, bias if number == len(factors) - 1 else None, overwrite)
            for number, (factor, part) in enumerate(zip(factors, columns, strict=True))
        ]
        whole = torch.cat([*(product for product, _ in products), last], -1) if products else last
        return [whole] if bias is None else [whole, bias]


@dataclass(eq=False, kw_only=True)
class CovarianceMethod(InputMethod):
    """A method that factorises each layer's covariance, block by block.

    Processes that add up their rows have the same covariances. Each of them factorises those that are dealt to it, and
    sends what comes of them to the others. See `Whitened` for the arguments.
    """

    #: What is done to a layer, in a word.
    verb: ClassVar[str]
    shaping: ClassVar[Sequence[str]] = ("max_dim",)

    damping: float
    max_dim: int | None
    max_rows: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        #: What was measured of the layers that move, by name and groups; and the places of those that are multiplied
        #: together, with their factors.
        self._grouped: tuple[list[Any], list[Any]] = [], []

    @abstractmethod
    def transform(self, layers: Sequence[LayerInputs], factors: Sequence[Factor]) -> Transform:
        """Return the transform of a layer, or of several of one shape with a stack of factors."""

    def transforms(self) -> Sequence[Transform]:
        """Return a transform for each layer whose inputs were seen and whose parameters have gradients."""
        layers = self.moving()
        measured = [(layer.name, layer.groups, self.measured[layer.name]) for layer in layers]
        if measured != self._grouped[0]:
            self._grouped = measured, list(self._groups(layers))
        return [self.transform([layers[place] for place in places], factors) for places, factors in self._grouped[1]]

    def _groups(self, layers: Sequence[LayerInputs]) -> Iterator[tuple[list[int], Sequence[Factor]]]:
        together: dict[Any, list[int]] = {}
        for place, layer in enumerate(layers):
            together.setdefault(_alike(layer), []).append(place)
        for places in together.values():
            each = [self.measured[layers[place].name] for place in places]
            yield places, each[0] if len(each) == 1 else [stacked([factor for (factor,) in each])]

    def moments(self, module: nn.Module, with_bias: bool) -> Covariance:
        return Covariance(module, with_bias, self.max_dim, self.max_rows)

    def how(self, layer: LayerInputs, measured: Sequence[Factor] | None) -> str:
        """Say how many columns are told apart."""
        return f"{self.verb if measured else 'nothing measured yet'}, {layer.moments}"

    def metrics(self) -> dict[str, float]:
        """Return what was measured last: of each layer the RMS of its inputs, and condition numbers of A and A + λI.

        The bias's 1 counts, and of blocks and groups the worst. Eigenvalues are found for it, at each call.
        """
        found = super().metrics()
        for layer in self.layers:
            if layer.name not in self.measured:
                continue
            moments: Any = layer.moments
            level = host.double(moments.average(layer.memory, layer.rows))
            low, high = (host.double(ends) for ends in moments.extremes(layer.memory, layer.rows))
            ridge = self.damping * torch.where(level > 0, level, 1.0)
            found[f"{layer.name}/input_rms"] = level.mean().sqrt().item()
            found[f"{layer.name}/condition"] = (high / low).max().item()
            found[f"{layer.name}/damped_condition"] = ((high + ridge) / (low + ridge)).max().item()
        for key in ("condition", "damped_condition"):
            found[f"largest_{key}"] = max(
                (value for name, value in found.items() if name.endswith(f"/{key}")), default=1.0
            )
        return found

    def measure_each(self, layers: Sequence[LayerInputs]) -> Iterator[Any]:
        """Measure the layers that are dealt to this process, and yield what all processes have found."""
        group = self.process_group.group
        count = distributed.get_world_size(group) if self.process_group.several else 1
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
                layer.absorb(self.decay)
            yield _sent(layer, own.get(layer), owner[layer], group)
        _agree([layer for layer in layers if layer not in owner], group)


def _alike(layer: LayerInputs) -> Any:
    """A key, equal for small layers of one shape: a call costs them more than what it computes."""
    moments, weight = layer.moments, layer.weight
    single = isinstance(moments, Covariance) and len(moments.blocks) == moments.groups == 1
    if not single or weight.numel() > _SMALL or hasattr(weight, "placements"):
        return id(layer)
    return moments.key, weight.shape, weight.dtype, weight.device, layer.layout, layer.groups


def _sent(layer: LayerInputs, found: Any, owner: int, group: Group) -> list[Factor] | NoRootError:
    """Send what one process has found to all others."""
    moments: Any = layer.moments
    stack = (moments.groups,) if moments.groups > 1 else ()
    shapes = [torch.Size((*stack, size, size)) for size in moments.sizes]
    total = sum(shape.numel() for shape in shapes)
    numbers = torch.empty(total, dtype=host.wide(layer.weight), device=layer.weight.device)
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
