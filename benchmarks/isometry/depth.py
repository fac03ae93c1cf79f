"""Isometry gap against depth in random networks: activations, ways to centre and normalise, and the theory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim.diagnostics import (
    gaussian_moments,
    hermite_coefficients,
    isometry_gap,
    isometry_strength,
    mean_field_bound,
)
from adiv_optim.layers import MeanFieldNorm

from ..runs import environment

WIDTH, DEPTH, SAMPLES = 1000, 30, 10
#: Between any two of the samples at depth 0.
CORRELATION = 0.5
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "exp": torch.exp,
}


class Variant(NamedTuple):
    """How a layer ends.

    Args:
        build: from the activation to what stands in its place.
        finish: what is measured of each sample and taken out of it.
    """

    build: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
    finish: Callable[[Tensor], Tensor]


def _same(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return activation


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _normalised(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=0.0)


#: Key in the result → how its layers end.
VARIANTS: dict[str, Variant] = {
    "layernorm": Variant(_same, lambda x: _normalised(_centred(x))),
    "centred": Variant(_same, _centred),
    "mean-field-centred": Variant(lambda f: MeanFieldNorm(f, normalize=False), _normalised),
    "mean-field": Variant(MeanFieldNorm, nn.Identity()),
}


def measure(seeds: int = 10, width: int = WIDTH, depth: int = DEPTH) -> dict[str, Any]:
    """Return gap by depth, quartiles over seeds, of every activation and variant, with limit and bound."""
    start = torch.full((SAMPLES, SAMPLES), CORRELATION, dtype=torch.float64).fill_diagonal_(1.0)
    gaps = torch.stack([_gaps(seed, start, width, depth) for seed in range(seeds)])
    result = {}
    for number, (name, activation) in enumerate(ACTIVATIONS.items()):
        strength = isometry_strength(activation)
        result[name] = {
            "strength": strength,
            "measured": {
                variant: [_quartiles(column) for column in gaps[:, :, number, at].unbind(1)]
                for at, variant in enumerate(VARIANTS)
            },
            "mean_field": _limit(activation, start, depth),
            "bound": mean_field_bound(start, strength, range(depth + 1)).tolist(),
        }
    return {
        "kind": "isometry-depth",
        "name": "isometry-depth",
        "width": width,
        "depth": depth,
        "samples": SAMPLES,
        "correlation": CORRELATION,
        "seeds": seeds,
        "activations": result,
        "environment": environment(),
    }


def _gaps(seed: int, start: Tensor, width: int, depth: int) -> Tensor:
    """Gap by depth, activation and variant, all of them behind the same weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    directions, _ = torch.linalg.qr(normal(width, SAMPLES))
    inputs = torch.linalg.cholesky(start) @ directions.T * width**0.5
    layers = [[(variant.build(f), variant.finish) for variant in VARIANTS.values()] for f in ACTIVATIONS.values()]
    x = inputs.expand(len(ACTIVATIONS), len(VARIANTS), *inputs.shape)
    gaps = [isometry_gap(x @ x.mT)]
    for _ in range(depth):
        h = x @ (normal(width, width) / width**0.5).T
        x = torch.stack([
            torch.stack([_finished(finish, f(row)) for (f, finish), row in zip(ends, rows, strict=True)])
            for ends, rows in zip(layers, h, strict=True)
        ])  # fmt: skip
        gaps.append(isometry_gap(x @ x.mT))
    return torch.stack(gaps)


def _finished(finish: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
    """The end of a layer; NaN where centring leaves only the rounding of a constant."""
    found = finish(output)
    return found if found.abs().max() > 1e-10 * output.abs().max() else torch.full_like(found, torch.nan)


def _quartiles(values: Tensor) -> list[float] | None:
    """Quartiles over seeds; None once a network has left the range of numbers."""
    if not values.isfinite().all():
        return None
    found: list[float] = values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype)).tolist()
    return found


def _limit(activation: Callable[[Tensor], Tensor], correlation: Tensor, depth: int) -> list[float]:
    """The gap of an infinitely wide network: ρ → Σ_{k≥1} c_k² ρᵏ / Σ_{k≥1} c_k² from layer to layer."""
    shares = hermite_coefficients(activation, 200).square()[1:] / gaussian_moments(activation).variance
    powers = torch.arange(1, 201)
    gaps = []
    for _ in range(depth + 1):
        gaps.append(isometry_gap(correlation).item())
        correlation = (correlation.unsqueeze(-1) ** powers) @ shares
        correlation.fill_diagonal_(1.0)
    return gaps
