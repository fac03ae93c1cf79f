"""What normalisers make of a thousand points of the plane (Bird 2025, Fig. 1)."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.figure import panels
from ..core.study import Recipe, measurement
from ..core.tables import Row, Section, Table, exact
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


_HELP = "what normalisers make of a thousand points of the plane"
STUDIES = {
    "normalisers-plane": measurement(
        _HELP, "plane", place, section, makes=[Recipe(0.01)], smoke="", page="docs/results/isometry.md"
    )
}
