"""Isometry gap against depth in random networks: activations, ways to centre and normalise, and the theory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import diagnostics
from adiv_optim.layers import MeanFieldNorm

from ..core.figure import panels, shade
from ..core.store import Result
from ..core.study import measurement
from ..core.table import markdown

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


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


#: How a layer ends: activation → what stands in its place; what is measured of each sample and taken out of it.
Variant = tuple[Callable[[Any], Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
VARIANTS: dict[str, Variant] = {
    "layernorm": (lambda f: f, lambda x: F.rms_norm(_centred(x), x.shape[-1:], eps=0.0)),
    "centred": (lambda f: f, _centred),
    "mean-field-centred": (lambda f: MeanFieldNorm(f, normalize=False), lambda x: F.rms_norm(x, x.shape[-1:], eps=0.0)),
    "mean-field": (MeanFieldNorm, nn.Identity()),
}


def compare(seeds: int = 10, width: int = WIDTH, depth: int = DEPTH) -> dict[str, Any]:
    """Return gap by depth, quartiles over seeds, of every activation and variant, with limit and bound."""
    start = torch.full((SAMPLES, SAMPLES), CORRELATION, dtype=torch.float64).fill_diagonal_(1.0)
    gaps, result = torch.stack([_gaps(seed, start, width, depth) for seed in range(seeds)]), {}
    for number, (name, activation) in enumerate(ACTIVATIONS.items()):
        strength = diagnostics.isometry_strength(activation)
        columns = {variant: gaps[:, :, number, at].unbind(1) for at, variant in enumerate(VARIANTS)}
        result[name] = {
            "strength": strength,
            "measured": {variant: [_quartiles(each) for each in found] for variant, found in columns.items()},
            "mean_field": _limit(activation, start, depth),
            "bound": diagnostics.mean_field_bound(start, strength, range(depth + 1)).tolist(),
        }
    about = {"width": width, "depth": depth, "samples": SAMPLES, "correlation": CORRELATION, "seeds": seeds}
    return {**about, "activations": result}


def _gaps(seed: int, start: Tensor, width: int, depth: int) -> Tensor:
    """Gap by depth, activation and variant, all of them behind the same weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    directions, _ = torch.linalg.qr(normal(width, SAMPLES))
    inputs = torch.linalg.cholesky(start) @ directions.T * width**0.5
    layers = [[(build(f), finish) for build, finish in VARIANTS.values()] for f in ACTIVATIONS.values()]
    x = inputs.expand(len(ACTIVATIONS), len(VARIANTS), *inputs.shape)
    gaps = [diagnostics.isometry_gap(x @ x.mT)]
    for _ in range(depth):
        h = x @ (normal(width, width) / width**0.5).T
        x = torch.stack([
            torch.stack([_finished(finish, f(row)) for (f, finish), row in zip(ends, rows, strict=True)])
            for ends, rows in zip(layers, h, strict=True)
        ])  # fmt: skip
        gaps.append(diagnostics.isometry_gap(x @ x.mT))
    return torch.stack(gaps)


def _finished(finish: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
    """The end of a layer; NaN where centring leaves only the rounding of a constant."""
    found = finish(output)
    return found if found.abs().max() > 1e-10 * output.abs().max() else torch.full_like(found, torch.nan)


def _quartiles(values: Tensor) -> list[float] | None:
    """Quartiles over seeds; None once a network has left the range of numbers."""
    return values.quantile(values.new_tensor([0.25, 0.5, 0.75])).tolist() if values.isfinite().all() else None


def _limit(activation: Callable[[Tensor], Tensor], correlation: Tensor, depth: int) -> list[float]:
    """The gap of an infinitely wide network: ρ → Σ_{k≥1} c_k² ρᵏ / Σ_{k≥1} c_k² from layer to layer."""
    variance = diagnostics.gaussian_moments(activation).variance
    shares = diagnostics.hermite_coefficients(activation, 200).square()[1:] / variance
    powers = torch.arange(1, 201)
    gaps = []
    for _ in range(depth + 1):
        gaps.append(diagnostics.isometry_gap(correlation).item())
        correlation = (correlation.unsqueeze(-1) ** powers) @ shares
        correlation.fill_diagonal_(1.0)
    return gaps


#: Panels of the figure with the bound; those that compare ways to end a layer have all activations.
BOUNDED = ("sigmoid", "tanh", "ReLU", "GELU")
#: Line, colour and label of every way to end a layer.
STYLES: dict[str, tuple[str, str, str]] = {
    "layernorm": ("-", "tab:blue", "centred and normalised"),
    "centred": ("--", "tab:red", "centred only"),
    "mean-field-centred": ("-.", "tab:green", "mean-field centred, normalised"),
    "mean-field": ("--", "tab:orange", "MeanFieldNorm"),
}


def section(result: Result, name: str, folder: Path) -> str:
    """Draw the figures into `folder`; return table and caption as Markdown."""
    found = result["activations"]
    where = f"width {result['width']}, {result['samples']} samples"
    with panels(BOUNDED, f"Isometry gap by depth, and its bound ({where})", folder / "isometry-depth.png") as axes:
        for axis, name in zip(axes, BOUNDED, strict=True):
            _line(axis, found[name]["measured"]["layernorm"], "layernorm", "measured")
            axis.plot(found[name]["mean_field"], ":", color="black", label="infinite width")
            axis.plot(found[name]["bound"], "--", color="tab:purple", label="bound by β")
        _by_depth(axes)
        axes[0].set_ylim(1e-4, 1)
    for file, what, variants in (
        ("unnormalised", "with and without normalising", ("layernorm", "centred")),
        ("mean-field", "by measured and by mean-field constants", ("layernorm", "mean-field-centred", "mean-field")),
    ):
        title = f"Isometry gap by depth, {what} ({where})"
        with panels(list(found), title, folder / f"isometry-{file}.png") as axes:
            for axis, each in zip(axes, found.values(), strict=True):
                for variant in variants:
                    _line(axis, each["measured"][variant], variant, STYLES[variant][2])
            _by_depth(axes)
    deep, rows = result["depth"], []
    for name, each in found.items():
        strength = each["strength"]
        cells = [f"{strength:.4f}", f"{(2 - strength) ** 2:.3f}"]
        cells += [f"{each[limit][deep]:.2g}" for limit in ("mean_field", "bound")]
        quartiles = [each["measured"][variant][deep] for variant in STYLES]
        cells += ["{1:.2g} ({0:.2g} to {2:.2g})".format(*three) if three else "out of range" for three in quartiles]
        rows.append([name, *cells])
    header = ["activation", "β", "(2 − β)²", "infinite width", "bound"]
    table = markdown([*header, *(label for *_, label in STYLES.values())], rows)
    start = found["ReLU"]["mean_field"][0]
    return (
        f"{table}\n\n"
        f"Isometry gap after {result['depth']} layers of width {result['width']}, weights N(0, 1/width), linear → "
        f"activation → centre → normalise, of {result['samples']} samples any two of which have a correlation of "
        f"{result['correlation']:g} at depth 0 (gap {start:.3f}): median and quartiles over {result['seeds']} draws of "
        "the weights, float64. Infinite width: the recursion of the Gram matrix. Bound: "
        "`diagnostics.mean_field_bound`, the gap at the start until it says more. It is one of infinite width, whose "
        "gap vanishes, where that of a finite width ends in noise of order samples / width. Out of range, a cross in "
        "the figures: in one of the draws the activations have left float64 or its precision. "
        f"torch {result['environment']['torch']}."
    )


def _line(axis: Any, quartiles: list[list[float] | None], variant: str, label: str) -> None:
    """Median with a band of quartiles, as far as there are numbers."""
    depths, shown = zip(*((depth, three) for depth, three in enumerate(quartiles) if three), strict=True)
    low, middle, high = zip(*shown, strict=True)
    line, color, _ = STYLES[variant]
    axis.plot(depths, middle, line, color=color, label=label, linewidth=1.6)
    shade(axis, depths, low, high, color, "band: quartiles")
    if len(depths) < len(quartiles):
        axis.plot(depths[-1], middle[-1], "x", color=color, markersize=8)


def _by_depth(axes: Sequence[Any]) -> None:
    for axis in axes:
        axis.set(xlabel="layers", yscale="log")
    axes[0].set_ylabel("isometry gap")


STUDIES = {"isometry-depth": measurement("isometry of random networks by depth", "depth", compare, section)}
