"""Results of a measurement: numbers per row, their summaries, and the printed table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._rows import MeasuredRows


@dataclass(frozen=True, eq=False)
class LayerDivergence:
    """How a step moves the outputs of one layer, its input held fixed; all tensors on the CPU, one number a row.

    The direction of a zero gradient, and a share of no movement, are NaN; summaries pass over these.

    Args:
        kind: the layer's class.
        correction: the rule its gradient follows, or None.
        total_rows: how many rows the layer saw: samples, tokens, or patches times groups.
        index: which of them were measured. The rows of further calls follow those of the first; a grouped
            convolution has the patches of its first group, then those of the second.
        cosine: between the effective update and −g.
        projection: ⟨Δz, −g⟩ / (η|g|²), the total gain over all rows; 1 is the ideal step.
        gain: the own gain γ, by the row's own part of the gradient.
        interference: the others' share of the movement, |Δz/η − o| / (|o| + |Δz/η − o|) with the row's own part o; with
            an optimizer the share that is not along g, |Δz⊥| / (|Δz∥| + |Δz⊥|).
        squared_norm: |x|² of the row's input; for a layer whose rows have no input each, of the sample.
        responsibility: parameter → its share of the own gain; the shares of a row add up to 1.
        descent: ⟨−Δθ, ∇L⟩/η over the layer's parameters, ∇L being the plain gradient of the loss, which this part of
            the step lowers to first order if it is above 0.
    """

    kind: str
    correction: str | None
    total_rows: int
    index: Tensor
    cosine: Tensor
    projection: Tensor
    gain: Tensor
    interference: Tensor
    squared_norm: Tensor
    responsibility: dict[str, Tensor]
    descent: float

    def summary(self) -> dict[str, Any]:
        """Return numbers and words by name: lower medians, means and (population) variances over the measured rows."""
        return {
            "kind": self.kind,
            "correction": self.correction,
            "total_rows": self.total_rows,
            "measured_rows": len(self.index),
            "cosine_median": self.cosine.nanmedian().item(),
            "projection_median": self.projection.nanmedian().item(),
            **_moments("gain", self.gain),
            "interference_median": self.interference.nanmedian().item(),
            **_moments("squared_norm", self.squared_norm),
            "responsibility": {name: share.nanmean().item() for name, share in self.responsibility.items()},
            "descent": self.descent,
        }


@dataclass(frozen=True, eq=False, repr=False)
class Divergence:
    """The result of `divergence`; printed, a table with one line per layer.

    Args:
        layers: path → the measurement there, in the order of the model's modules.
        left_out: path → why a layer with trainable parameters was not measured.
        loss: of the batch.
        descent: ⟨−Δθ, ∇L⟩/η over all trainable parameters, η being the greatest rate of all groups. NaN where all
            rates are 0, or the optimizer holds frozen parameters alone.
        optimizer: the class of the optimizer whose step was measured, as "Whitened(Adam)"; None for the gradient step.
    """

    layers: dict[str, LayerDivergence]
    left_out: dict[str, str]
    loss: float
    descent: float
    optimizer: str | None

    def metrics(self) -> dict[str, float]:
        """Return a flat dict of numbers, for any logger.

        The names are "divergence/descent", and "divergence/path/column" with the columns of the printed table, and
        "own gain deviation".
        """
        by_layer = {path: columns(layer.summary()) for path, layer in self.layers.items()}
        numbers = {f"divergence/{path}/{name}": n for path, each in by_layer.items() for name, n in each.items()}
        return {"divergence/descent": self.descent, **numbers}

    def __str__(self) -> str:
        """Return an aligned table of `columns`, with notes; the own gain is mean ± deviation over rows."""
        table = [("layer", *_HEADER, ""), *(_line(path, layer.summary()) for path, layer in self.layers.items())]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join([path.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for path, *cells in table]
        lines += [f"{path or 'model'}: left out ({reason})" for path, reason in self.left_out.items()]
        lines.append("Var|x|²: the variance over rows of the squared norm of their inputs; 0 where all are as long")
        if any(layer.descent <= 0 for layer in self.layers.values()):
            lines.append("not downhill: to first order this layer's part of the step does not lower the loss")
        if self.descent <= 0:
            lines.append("the step as a whole is not downhill: ⟨−Δθ, ∇L⟩ ≤ 0")
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__  # for notebooks


_HEADER = ("rows", "cosine", "projection", "own gain", "interference", "weight share", "Var|x|²")


def columns(summary: Mapping[str, Any]) -> dict[str, float]:
    """Name a layer's numbers as the printed table does: medians, the mean own gain, and its deviation."""
    numbers = (
        float(summary["measured_rows"]),
        summary["cosine_median"],
        summary["projection_median"],
        summary["gain_mean"],
        summary["interference_median"],
        summary["responsibility"].get("weight", math.nan),
        summary["squared_norm_variance"],
    )
    return {**dict(zip(_HEADER, numbers, strict=True)), "own gain deviation": math.sqrt(summary["gain_variance"])}


def _line(path: str, summary: Mapping[str, Any]) -> tuple[str, ...]:
    total = summary["total_rows"]
    measured, cosine, projection, gain, interference, share, variance, deviation = columns(summary).values()
    return (
        f"{path or 'model'} ({summary['kind']})",
        f"{total}" if total == measured else f"{measured:.0f} of {total}",
        f"{cosine:.3f}",
        f"{projection:.3g}",
        f"{gain:.3g} ± {deviation:.2g}",
        f"{interference:.3f}",
        "–" if math.isnan(share) else f"{share:.3f}",
        f"{variance:.3g}",
        "not downhill" if summary["descent"] <= 0 else "",  # NaN has no verdict
    )


def summarise(rows: MeasuredRows, parameters: list[str], by_optimizer: bool) -> dict[str, Any]:
    """Turn movements into cosines, gains and shares, on the CPU."""
    length = rows.grad.norm(dim=-1)
    direction = rows.grad / length.unsqueeze(-1)
    along = -(rows.movement * direction).sum(-1)
    if by_optimizer:  # of an optimizer's step no part belongs to one row: only its direction can be split
        own_part, others = along.abs(), (rows.movement + along.unsqueeze(-1) * direction).norm(dim=-1)
    else:
        own_part, others = rows.own_movement.norm(dim=-1), (rows.movement - rows.own_movement).norm(dim=-1)
    gain = rows.own_gains.sum(-1)
    shares = rows.own_gains / gain.unsqueeze(-1)
    return {
        "index": rows.row_index.cpu(),
        "cosine": (along / rows.movement.norm(dim=-1)).cpu(),
        "projection": (along / length).cpu(),
        "gain": gain.cpu(),
        "interference": (others / (own_part + others)).cpu(),
        "squared_norm": rows.squared_norm.cpu(),
        "responsibility": dict(zip(parameters, shares.cpu().unbind(-1), strict=True)),
    }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Put what `summarise` returned of several calls behind each other."""
    shares = [part.pop("responsibility") for part in parts]
    whole: dict[str, Any] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return whole | {"responsibility": {name: torch.cat([each[name] for each in shares]) for name in shares[0]}}


def _moments(name: str, values: Tensor) -> dict[str, float]:
    mean = values.nanmean()
    return {f"{name}_mean": mean.item(), f"{name}_variance": (values - mean).square().nanmean().item()}
