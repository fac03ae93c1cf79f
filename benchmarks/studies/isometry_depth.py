"""Random networks: isometry gap by depth, by activations and ways to centre and normalise, with the theory.

And what normalisers make of a thousand points of the plane (Bird 2025, Fig. 1).
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import diagnostics
from adiv_optim.layers import MeanFieldNorm

from ..core.figure import panels, seaborn
from ..core.store import Result
from ..core.study import Recipe, measurement
from ..core.tables import Row, Section, Table, exact, ranged
from ..methods import METHODS

WIDTH, DEPTH, SAMPLES = 1000, 30, 10
#: Between any two of the samples at depth 0.
CORRELATION = 0.5
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "ReLU": torch.relu, "GELU": F.gelu, "exp": torch.exp,
    "SELU": F.selu, "leaky ReLU": F.leaky_relu,
}  # fmt: skip
#: What Xavier's initialisation multiplies weights by, of torch; of the others 1.
GAINS: dict[Any, float] = {
    torch.tanh: nn.init.calculate_gain("tanh"), torch.relu: nn.init.calculate_gain("relu"),
    F.selu: nn.init.calculate_gain("selu"), F.leaky_relu: nn.init.calculate_gain("leaky_relu"),
}  # fmt: skip


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _normalised(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=0.0)


#: How a layer ends: activation → what stands in its place; what is measured of each sample and taken out of it.
VARIANTS: dict[str, tuple[Callable[[Any], Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "layernorm": (lambda f: f, lambda x: _normalised(_centred(x))),
    "centred": (lambda f: f, _centred),
    "mean-field-centred": (lambda f: MeanFieldNorm(f, normalize=False), _normalised),
    "mean-field": (MeanFieldNorm, nn.Identity()),
    "normalised-first": (lambda f: lambda h: f(_normalised(_centred(h))), nn.Identity()),
    "xavier": (lambda f: lambda h: f(GAINS.get(f, 1.0) * h), nn.Identity()),
}


def compare(seeds: int = 10, width: int = WIDTH, depth: int = DEPTH) -> dict[str, Any]:
    """Return gap by depth, quartiles over seeds, of every activation and variant, with limit and bound."""
    start = torch.full((SAMPLES, SAMPLES), CORRELATION, dtype=torch.float64).fill_diagonal_(1.0)
    limits = {name: _limits(activation, start, depth) for name, activation in ACTIVATIONS.items()}
    wide, result = torch.stack(list(limits.values()), 1).unsqueeze(2), {}
    gaps, errors = zip(*(_measured(seed, start, width, wide) for seed in range(seeds)), strict=True)
    for number, (name, activation) in enumerate(ACTIVATIONS.items()):
        measured, error = (
            {variant: [_quartiles(each) for each in torch.stack(values)[:, :, number, at].unbind(1)]
             for at, variant in enumerate(VARIANTS)} for values in (gaps, errors)
        )  # fmt: skip
        strength = diagnostics.isometry_strength(activation)
        result[name] = {
            "strength": strength,
            "mean_field": [diagnostics.isometry_gap(limit).item() for limit in limits[name]],
            "bound": bound(start, strength, depth).tolist(),
            "measured": measured,
            "error": {variant: error[variant] for variant in WITH_LIMIT},
        }
    about = {"width": width, "depth": depth, "samples": SAMPLES, "correlation": CORRELATION, "seeds": seeds}
    return {**about, "activations": result}


def bound(start: Tensor, strength: float, depth: int) -> Tensor:
    """Bound of the gap by depth, of correlations (Joudaki et al. 2023, Thm. A.2 and Lemma A.4): 2nγβ^−ℓ, or the start.

    The latter, which is never exceeded, where the former is above 1; γ is the greatest |ρ| / (1 − |ρ|).
    """
    largest, gap = start.tril(-1).abs().max(), diagnostics.isometry_gap(start)
    falling = 2 * len(start) * (largest / (1 - largest)) * strength ** -torch.arange(depth + 1, dtype=start.dtype)
    return torch.where(falling <= 1, falling.minimum(gap), gap)


def _measured(seed: int, start: Tensor, width: int, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Gap by depth, activation and variant, all of them behind the same weights, and the distance from the limit."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    directions, _ = torch.linalg.qr(normal(width, SAMPLES))
    inputs = torch.linalg.cholesky(start) @ directions.T * width**0.5
    ends = [(build(f), finish) for f, (build, finish) in product(ACTIVATIONS.values(), VARIANTS.values())]
    x = inputs.expand(len(ACTIVATIONS), len(VARIANTS), *inputs.shape)
    grams = [x @ x.mT]
    for _ in limits[1:]:
        h = x @ (normal(width, width) / width**0.5).T
        rows = [_finished(finish, f(row)) for (f, finish), row in zip(ends, h.flatten(0, 1), strict=True)]
        x = torch.stack(rows).view_as(h)
        grams.append(x @ x.mT)
    found = torch.stack(grams)
    distance = torch.linalg.matrix_norm(found / width - limits) / torch.linalg.matrix_norm(limits)
    return diagnostics.isometry_gap(found), distance


def _finished(finish: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
    """The end of a layer; NaN where centring leaves only the rounding of a constant."""
    found = finish(output)
    return found if found.abs().max() > 1e-10 * output.abs().max() else torch.full_like(found, torch.nan)


def _quartiles(values: Tensor) -> list[float] | None:
    """Quartiles over seeds; None once a network has left the range of numbers."""
    if not values.isfinite().all():
        return None
    return [float(f"{value:.10g}") for value in values.quantile(values.new_tensor([0.25, 0.5, 0.75])).tolist()]


def _limits(activation: Callable[[Tensor], Tensor], correlation: Tensor, depth: int) -> Tensor:
    """Gram matrices of an infinitely wide network: ρ → Σ_{k≥1} c_k² ρᵏ / Σ_{k≥1} c_k² from layer to layer."""
    variance = diagnostics.gaussian_moments(activation).variance
    shares = diagnostics.hermite_coefficients(activation, 200).square()[1:] / variance
    powers = torch.arange(1, 201)
    found = [correlation]
    for _ in range(depth):
        found.append(((found[-1].unsqueeze(-1) ** powers) @ shares).fill_diagonal_(1.0))
    return torch.stack(found)


#: Variants that have a limit: where rows have a length of √width, or about that.
WITH_LIMIT = ("layernorm", "mean-field")


_BOUNDED, _OTHERS = ("sigmoid", "tanh", "ReLU", "GELU"), ("ReLU", "tanh", "SELU")
_CONSTANTS, _ORDERS = ("layernorm", "mean-field-centred", "mean-field"), ("layernorm", "normalised-first", "mean-field")
#: File → what is compared by depth, activations with a panel each, curves, and the least of the axis.
FIGURES: dict[str, tuple[str, Sequence[str], Sequence[str], float | None]] = {
    "depth": ("and its bound", _BOUNDED, ("layernorm", "mean_field", "bound"), 1e-4),
    "unnormalised": ("with and without normalising", (*_BOUNDED, "exp"), ("layernorm", "centred"), None),
    "mean-field": ("by measured and by mean-field constants", (*_BOUNDED, "exp"), _CONSTANTS, None),
    "order": ("normalised after the activation, before it, or by constants", _OTHERS, _ORDERS, None),
    "xavier": (
        "by mean-field constants and by Xavier's gain", ("SELU", "leaky ReLU", "ReLU", "tanh"),
        ("mean-field", "xavier"), None,
    ),
    "error": ("against infinite width", _OTHERS, WITH_LIMIT, 0.02),  # above the rounding that depth 0 has
}  # fmt: skip
#: Curve → dashes, colour and label; a variant's is in the table as well.
STYLES: dict[str, tuple[Any, str, str]] = {
    "layernorm": ("", "tab:blue", "centred and normalised"),
    "centred": ((4, 1.5), "tab:red", "centred only"),
    "mean-field-centred": ((3, 1.25, 1.5, 1.25), "tab:green", "mean-field centred, normalised"),
    "mean-field": ((4, 1.5), "tab:orange", "MeanFieldNorm"),
    "normalised-first": ((1, 1), "tab:brown", "normalised before the activation"),
    "xavier": ((1, 1), "tab:purple", "Xavier's gain alone"),
    "mean_field": ((1, 1), "black", "infinite width"),
    "bound": ((4, 1.5), "tab:purple", "bound by β"),
}


def section_of_depths(result: Result, name: str, folder: Path) -> Section:
    """Draw the figures into `folder`; return table and caption as Markdown."""
    for file in FIGURES:
        _draw(file, result, folder / f"isometry-{file}.png")
    deep, rows = result["depth"], list[Row]()
    for name, each in result["activations"].items():
        strength = each["strength"]
        cells = [exact(strength, ".4f"), exact((2 - strength) ** 2, ".3f")]
        cells += [exact(each[limit][deep], ".2g") for limit in ("mean_field", "bound")]
        quartiles = [each["measured"][variant][deep] for variant in VARIANTS]
        quartiles += [each["error"][variant][deep] for variant in WITH_LIMIT]
        rows.append([name, *cells, *(ranged(*each) if each else "out of range" for each in quartiles)])
    header = ["activation", "β", "(2 − β)²", "infinite width", "bound", *(STYLES[variant][2] for variant in VARIANTS)]
    labels = [f"distance from infinite width, {STYLES[variant][2]}" for variant in WITH_LIMIT]
    table = Table([*header, *labels], rows)
    about = f"Gap after {deep} layers of width {result['width']}: median and quartiles over draws of the weights."
    return Section([table, f"{about} Out of range: activations left float64 or its precision."])


def _draw(file: str, result: Result, path: Path) -> None:
    """Draw medians by depth with bands of quartiles, as far as there are numbers."""
    what, activations, curves, low = FIGURES[file]
    quantity, measured, ylabel = "measured", "Isometry gap", "isometry gap"
    if file == "error":
        quantity, measured, ylabel = "error", "Distance of the Gram matrix", "relative distance"
    title = f"{measured} by depth, {what} (width {result['width']}, {result['samples']} samples)"
    limits: dict[str, Any] = {"ylim": (low, 1 if file == "depth" else None)} if low else {}
    look: dict[str, Any] = {"x": "depth", "y": "value", "hue": "curve", "style": "curve", "linewidth": 1.6}
    dashes, colors, labels = zip(*(STYLES[name] for name in curves), strict=True)
    look |= {"palette": dict(zip(labels, colors, strict=True)), "dashes": dict(zip(labels, dashes, strict=True))}
    with panels(activations, title, path, xlabel="layers", ylabel=ylabel, yscale="log", **limits) as axes:
        for axis, activation in zip(axes, activations, strict=True):
            each, points = result["activations"][activation], []
            for name in curves:
                quartiles = each[quantity][name] if name in VARIANTS else [[value] for value in each[name]]
                there = [values for values in quartiles if values]
                _, color, label = STYLES[name]
                points += [(label, depth, value) for depth, values in enumerate(there) for value in values]
                if len(there) < len(quartiles):
                    axis.plot(len(there) - 1, there[-1][1], "x", color=color, markersize=8)
            # The lowest, the middle and the highest of three quartiles are these themselves.
            frame = pd.DataFrame(points, columns=["curve", "depth", "value"])
            seaborn(sns.lineplot, axis, frame, **look, estimator="median", errorbar=("pi", 100))
            axis.fill_between([], [], [], color="0.5", alpha=0.3, linewidth=0, label="band: quartiles")


#: What figure and table call them → the methods of the other studies.
NORMALISERS = {
    "BatchNorm": METHODS["batchnorm"], "LayerNorm": METHODS["layernorm"], "L2 norm": METHODS["l2norm"],
    "RMSNorm": METHODS["rmsnorm"], "affine-like": METHODS["affine-like"],
}  # fmt: skip


@torch.no_grad()
def place(points: int = 1000) -> dict[str, Any]:
    """Return normal points, and where every normaliser puts them."""
    inputs = torch.randn(points, 2, generator=torch.Generator().manual_seed(0))
    outputs = {}
    for name, method in NORMALISERS.items():
        *_, affine = layers = method.affine(2, 2)
        affine.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
        outputs[name] = _rounded(nn.Sequential(*layers)(inputs))
    return {"inputs": _rounded(inputs), "outputs": outputs}


def _rounded(points: torch.Tensor) -> dict[str, list[float]]:
    # Enough for a figure, and for whether a point lies on a circle.
    x, y = ([round(value, 4) for value in column.tolist()] for column in points.double().unbind(1))
    return {"x": x, "y": y}


def section_of_plane(result: dict[str, Any], name: str, folder: Path) -> Section:
    """Draw the points into `folder`; return table and caption as Markdown."""
    names, count, path = list(result["outputs"]), len(result["inputs"]["x"]), folder / f"{name}.png"
    title = f"{count} standard normal points, and where each normaliser puts them"
    look: dict[str, Any] = {"aspect": "equal", "xlim": (-3.6, 3.6), "ylim": (-3.6, 3.6)}
    with panels(names, title, path, xlabel="$x_1$", ylabel="$x_2$", **look) as axes:
        for axis, (name, points) in zip(axes, result["outputs"].items(), strict=True):
            drawn = {"input": (result["inputs"], "0.5", 9, 0.35), name: (points, NORMALISERS[name].color, 16, 0.5)}
            for label, (where, color, size, alpha) in drawn.items():
                axis.scatter(**where, s=size, color=color, alpha=alpha, linewidth=0)
                axis.scatter([], [], s=40, color=color, linewidth=0, label=label)  # large enough for a legend
    rows = list[Row]()
    for name in names:
        lengths = sorted((x * x + y * y) ** 0.5 for x, y in zip(*result["outputs"][name].values(), strict=True))
        low, middle, high = (lengths[int(share * (count - 1))] for share in (0.05, 0.5, 0.95))
        rows.append([name, *(exact(length, ".3f") for length in (low, middle, high))])
    caption = f"{count} points from a standard normal in the plane. torch {result['environment']['torch']}."
    return Section([Table(["length of the outputs", "5 %", "median", "95 %"], rows), caption])


STUDIES = {
    "isometry-depth": measurement(
        "isometry of random networks by depth", "depth", compare, section_of_depths,
        makes=[Recipe(0.02)], page="docs/results/isometry.md",
    ),
    "normalisers-plane": measurement(
        "what normalisers make of a thousand points of the plane", "plane", place, section_of_plane,
        makes=[Recipe(0.01)], smoke="", page="docs/results/isometry.md",
    ),
}  # fmt: skip
