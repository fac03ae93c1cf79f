"""Several processes that train the same layers: how weights may be sharded, and sums over their inputs added up."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from .._distributed import Group, add_up, cut_of, why_not_one_cut
from ..rows.layers import Layout, plain_type
from .covariance import MeanSquare, Sums
from .layer_inputs import LayerInputs


def refuse_shards(where: str, layers: Iterable[LayerInputs], group: Group) -> None:
    """Raise a ValueError if parts of a layer are not whole rows, or stand on processes whose rows do not count."""
    for layer in layers:
        mesh: Any = getattr(layer.weight, "device_mesh", None)
        placed = [getattr(parameter, "placements", "a whole") for parameter in layer.parameters]
        cut, plain = cut_of(layer.weight), layer.layout == Layout(transposed=False, groups=1)
        if any(map(why_not_one_cut, layer.parameters)) or placed[0] != placed[-1] or (cut and (cut.dim or not plain)):
            raise ValueError(
                f"{where}: {layer.name!r} of a {plain_type(layer.modules[0]).__name__} is sharded as "
                f"{' with its bias as '.join(map(str, placed))}, which is no whole rows of outputs that read one "
                "input; cut both along dimension 0 by fully_shard alone, which is its default, or name this layer in "
                "skip, as one must with groups of a convolution or a transposed weight."
            )
        if mesh is None:
            continue
        counted = distributed.get_process_group_ranks(group or distributed.group.WORLD)
        if missing := sorted({*mesh.mesh.flatten().tolist()}.difference(counted)):
            raise ValueError(
                f"{where}: ranks {missing} hold a part of {layer.name!r} and are not in process_group; what it reads "
                "must be added up over all of its mesh: give a group that has them, or leave process_group=None."
            )


def add_up_sums(layers: Sequence[LayerInputs], sums: Sequence[Sums | None], group: Group) -> list[Sums | None]:
    """Add sums up over processes, of all layers that any of them has seen, so that all take part."""
    # On the device of sums of now: the model may have moved.
    none = [[part.to(each.weight.device) for part in each.covariance.no_sums().parts] for each in layers]
    every = [Sums(zeros, 0).plus(here) for zeros, here in zip(none, sums, strict=True)]
    counts = torch.tensor([each.rows for each in every], device=layers[0].weight.device)
    add_up([counts], group)
    totals = [Sums(each.parts, rows) if rows else None for each, rows in zip(every, counts.tolist(), strict=True)]
    add_up([part for each in totals if each is not None for part in each.parts], group)
    return totals


def agree(averages: Mapping[LayerInputs, MeanSquare], group: Group) -> dict[LayerInputs, MeanSquare]:
    """Return averages of which all processes have the eigenvectors of the first.

    Others may differ by a sign, or by rounding that nearly equal eigenvalues make large, and the products with them of
    different processes could not be added up.
    """
    is_first, agreed = distributed.get_rank(group) == 0, dict(averages)
    for layer, average in averages.items():
        if average.depends_on_statistics:
            statistics = [t.clone() if is_first else torch.zeros_like(t) for t in average.statistics]
            agreed[layer] = average.with_statistics(statistics, average.rows)
    add_up([t for average in agreed.values() if average.depends_on_statistics for t in average.statistics], group)
    return agreed
