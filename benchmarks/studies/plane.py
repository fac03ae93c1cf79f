"""What normalisers make of a thousand points of the plane (Bird 2025, Fig. 1)."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
import torch
from torch import nn

from ..core.figures import facets, finished
from ..core.study import Recipe, measurement
from ..core.tables import Section, Table
from ..methods import METHODS

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


def section(result: dict[str, Any], name: str, folder: Path) -> Section:
    """Draw the points into `folder`; return table and caption as Markdown."""
    inputs, names = pd.DataFrame(result["inputs"]), list(result["outputs"])
    outputs = {normaliser: pd.DataFrame(points) for normaliser, points in result["outputs"].items()}
    pairs = [(each, of, points) for each in names for of, points in (("input", inputs), (each, outputs[each]))]
    clouds = [points.assign(normaliser=each, of=of) for each, of, points in pairs]
    grid = sns.relplot(
        pd.concat(clouds), x="x", y="y", hue="of", size="of", col="normaliser", alpha=0.5, linewidth=0,
        palette={"input": "0.5", **{each: NORMALISERS[each].color for each in names}},
        sizes={"input": 9, **dict.fromkeys(names, 16)}, **facets(len(names), 3.7),
    )  # fmt: skip
    title = f"{len(inputs)} standard normal points, and where each normaliser puts them"
    look: dict[str, Any] = {"box_aspect": 1, "xlim": (-3.6, 3.6), "ylim": (-3.6, 3.6), "xlabel": "$x_1$"}
    finished(grid, title, folder / f"{name}.png", ylabel="$x_2$", **look)
    records = []
    for normaliser, points in outputs.items():
        lengths = np.sort(np.sqrt(points["x"] ** 2 + points["y"] ** 2))
        quantiles = {column: lengths[int(share * (len(lengths) - 1))] for column, share in _QUANTILES.items()}
        records.append({"length of the outputs": normaliser, **quantiles})
    caption = (
        f"{len(inputs)} points from a standard normal in the plane (as Bird 2025, Fig. 1). BatchNorm leaves them "
        "nearly where they are, LayerNorm keeps one sign of two numbers, L2 norm and RMSNorm keep the direction alone; "
        "affine-like, with W = I and b = 0, fills the disc: its outputs keep the order of their lengths. "
        f"torch {result['environment']['torch']}."
    )
    columns = {"length of the outputs": "{length of the outputs}", **{each: f"{{{each}:.3f}}" for each in _QUANTILES}}
    return Section([Table.of(records, columns), caption])


_QUANTILES = {"5 %": 0.05, "median": 0.5, "95 %": 0.95}
_HELP = "what normalisers make of a thousand points of the plane"
STUDIES = {
    "normalisers-plane": measurement(
        _HELP, "plane", place, section, makes=[Recipe(0.01)], smoke="", page="docs/results/isometry.md"
    )
}
