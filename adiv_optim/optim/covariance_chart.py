"""Charts that factorise covariances, each on one process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import distributed

from .._linalg import host
from .._linalg.roots import Factor, NoRootError, Whole
from .._linalg.shards import Group, add_up
from .covariance import InputCovariance, Limits, WholeCovariance
from .followers import Readers, agree
from .input_chart import InputChart
from .leading import LeadingCovariance

Covariance = TypeVar("Covariance", bound=InputCovariance)


@dataclass(eq=False, kw_only=True)
class CovarianceChart(InputChart[Covariance, Sequence[Factor]]):
    """A chart that factorises each layer's covariance, block by block.

    Processes that add up their rows have the same covariances. Each of them factorises those that are dealt to it, and
    sends what comes of them to the others. Layers that read one tensor have one covariance, and what is made of it.

    Args:
        damping: λ in units of the mean eigenvalue.
        max_dim: how many columns of a layer are one block at most.
        max_rows: how many rows of a forward pass count at most.
    """

    #: What is done to a layer, in a word.
    verb: ClassVar[str]

    damping: float
    max_dim: int | None
    max_rows: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.readers = Readers()
        #: By layer the one whose covariance it has too.
        self.shared: dict[str, str] = {}

    @property
    def limits(self) -> Limits:
        """Of the layers' covariances."""
        return Limits(self.max_dim, self.max_rows)

    def how(self, layer: Covariance, measured: Sequence[Factor] | None) -> str:
        """Say how many columns are told apart."""
        return f"{self.verb if measured else 'nothing measured yet'}, {layer.columns()}"

    def gather(self) -> None:
        """Add up what layers have seen since the last time over processes, of those that do not follow another one."""
        known = set(self.layers)
        for layer in self.layers:
            # A layer that is followed may have been called again, without this one, or been replaced.
            if layer.source is not None and (layer.source.calls != layer.calls or layer.source not in known):
                layer.part()
        super().gather()

    def counts(self) -> list[int]:
        """Settle which layers follow another one, and return how many rows all processes have seen of the others."""
        return agree(self.layers, self.process_group.group)

    def measure_all(self) -> None:
        """Measure, and give layers that have followed another one what was found of it."""
        self.readers.forget()
        followed = {layer: layer.source for layer in self.layers if layer.source is not None}
        super().measure_all()
        for layer, first in followed.items():
            layer.forget_pending()
            layer.take(first)
            if first.name in self.measured:
                self.measured[layer.name] = self.measured[first.name]
            for counts in (self.failures, self.spoiled):
                if first.name in counts:
                    counts[layer.name] = counts[first.name]
        self.shared = {layer.name: first.name for layer, first in followed.items()}

    def remark(self, layer: Covariance) -> str:
        """Say which other layer reads the same, and what else there is to say."""
        shared = f", one covariance with {first}" if (first := self.shared.get(layer.name)) else ""
        return f"{shared}{super().remark(layer)}"

    def measure_each(self, layers: Sequence[Covariance]) -> Iterator[Sequence[Factor] | NoRootError]:
        """Measure the layers that are dealt to this process, and yield what all processes have found."""
        group = self.process_group.group
        count = distributed.get_world_size(group) if self.together else 1
        if count == 1:
            yield from super().measure_each(layers)
            return
        # The leading eigenvectors cost less to find than to wait for.
        heavy = [layer for layer in layers if isinstance(layer, WholeCovariance)]
        mine, owner = distributed.get_rank(group), deal(heavy, count)
        own = {layer: self.measure_now(layer) for layer in heavy if owner[layer] == mine}
        for layer in layers:
            if layer not in owner:
                yield self.measure_now(layer)
                continue
            stack = (layer.groups,) if layer.groups > 1 else ()
            shapes = [torch.Size((*stack, size, size)) for size in layer.sizes]
            numbers = torch.empty(sum(shape.numel() for shape in shapes), dtype=layer.dtype, device=layer.weight.device)
            found = own.pop(layer, None)
            if isinstance(found, NoRootError):
                numbers.fill_(torch.nan)
            elif found is not None:
                torch.cat([factor.matrix.flatten() for factor in found if isinstance(factor, Whole)], out=numbers)
            else:
                layer.absorb(self.decay)
            distributed.broadcast(numbers, group=group, group_src=owner[layer])
            if not all(host.read(numbers[0].isfinite())):
                yield NoRootError(f"no root of {layer.columns()} found by the process that they were dealt to")
                continue
            parts = zip(numbers.split([shape.numel() for shape in shapes]), shapes, strict=True)
            yield [Whole(part.view(shape)) for part, shape in parts]
        _agree([layer for layer in layers if isinstance(layer, LeadingCovariance)], group)


def _agree(layers: Sequence[LeadingCovariance], group: Group) -> None:
    """Let all processes have the eigenvectors of the first.

    Others may differ by a sign, or by rounding that nearly equal eigenvalues make large, and the products with them of
    different processes could not be added up.
    """
    first = distributed.get_rank(group) == 0
    for layer in layers:  # made anew, not in place: maps hold the old ones
        layer.bases, layer.total = (
            [tensor.clone() if first else torch.zeros_like(tensor) for tensor in kept]
            for kept in (layer.bases, layer.total or [])
        )
    add_up([tensor for layer in layers for tensor in (*layer.bases, *(layer.total or ()))], group)


def deal(layers: Sequence[Covariance], count: int) -> dict[Covariance, int]:
    """Which of so many processes factorises which layer: the dearest first, each to the one with the least to do."""
    loads, owner = [0] * count, {}
    for work, place in sorted((-layer.groups * sum(n**3 for n in layer.sizes), k) for k, layer in enumerate(layers)):
        least = loads.index(min(loads))
        loads[least] -= work
        owner[layers[place]] = least
    return owner
