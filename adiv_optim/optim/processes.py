"""Sums over processes, and the factorisations that are dealt out among them: one finds for all what all need."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from .._linalg import host
from .._linalg.roots import NoRootError, Whole
from .._linalg.shards import Group, add_up
from .covariance import Covariance, MeanSquare
from .layer_inputs import LayerInputs

#: Covariances → the factors of each, or why there are none.
FactorsOfEach = Callable[[Sequence[Any]], list[Any]]


def add_up_rows(layers: Sequence[LayerInputs], group: Group) -> None:
    """Add up what is pending over processes, for all layers that any of them has seen, so that all take part.

    Layers go on sharing their sums if they share them on every process.
    """
    pending = [[layer.pending_rows, id(layer.pending) if layer.pending_rows else 0] for layer in layers]
    size, device = distributed.get_world_size(group), layers[0].weight.device
    every = torch.zeros(size, len(layers), 2, dtype=torch.int64, device=device)
    every[distributed.get_rank(group)] = torch.tensor(pending, device=device)
    add_up([every], group)
    first: dict[tuple[int, ...], LayerInputs] = {}
    blocks: list[Tensor] = []
    for layer, (rows, lists) in zip(layers, every.permute(1, 2, 0).tolist(), strict=True):
        if not any(rows):
            continue
        layer.pending_rows = sum(rows)
        other = first.setdefault(tuple(lists), layer)
        if other is not layer:
            layer.pending = other.pending
            continue
        sums = layer.covariance.no_sums() if layer.pending is None else layer.pending
        layer.pending = [tensor.clone() for tensor in sums]  # others may share it here, and not elsewhere
        blocks += layer.pending
    add_up(blocks, group)


def factors_by_all(factors_of: FactorsOfEach, covariances: Sequence[MeanSquare], group: Group) -> list[Any]:
    """Factorise the covariances that are dealt to this process, and return the factors that all processes have found.

    The leading eigenvectors cost less to find than to wait for, and so do mean squares: each process finds all of them.
    """
    heavy = [each for each in covariances if type(each) is Covariance]
    mine, owner = distributed.get_rank(group), deal(heavy, distributed.get_world_size(group))
    at_home = [each for each in covariances if owner.get(each, mine) == mine]
    factors = dict(zip(at_home, factors_of(at_home), strict=True))
    return [
        _sent(each, factors.get(each), owner[each], group) if each in owner else factors[each] for each in covariances
    ]


def deal(covariances: Sequence[Covariance], count: int) -> dict[MeanSquare, int]:
    """Deal covariances out to so many processes: the dearest first, each to the one with the least to do."""
    loads, owner = [0] * count, dict[MeanSquare, int]()
    work = [each.groups * sum(n**3 for n in each.sizes) for each in covariances]
    for place in sorted(range(len(covariances)), key=lambda place: (-work[place], place)):
        least = loads.index(min(loads))
        loads[least] += work[place]
        owner[covariances[place]] = least
    return owner


def _sent(covariance: Any, factors: Any, owner: int, group: Group) -> list[Whole] | NoRootError:
    """Send the factors that one process has found to all others."""
    shapes = [torch.Size((covariance.groups, size, size)) for size in covariance.sizes]
    lengths = [shape.numel() for shape in shapes]
    numbers = covariance.memory[0].new_empty(sum(lengths))
    if isinstance(factors, NoRootError):
        numbers.fill_(torch.nan)
    elif factors is not None:
        torch.cat([factor.matrix.flatten() for factor in factors], out=numbers)
    distributed.broadcast(numbers, group=group, group_src=owner)
    if not all(host.read(numbers[0].isfinite())):
        return NoRootError(f"no root of {covariance} found by the process that they were dealt to")
    return [Whole(part.view(shape)) for part, shape in zip(numbers.split(lengths), shapes, strict=True)]


def agree(layers: Sequence[LayerInputs], group: Group) -> None:
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
