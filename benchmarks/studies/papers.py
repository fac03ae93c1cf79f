"""The papers' other protocols on images: widths, depths, no activation, skips, proportions, and UC's Appendix D.3."""

from collections.abc import Sequence
from functools import partial

from ..core.study import Recipe, Study, at_lengths
from ..images.run import Grid
from ..methods import having
from .comparison import PAPERS, grid_study, presets
from .sweep import sweep

_PAPER: Grid = {**PAPERS, "method": [*having("papers"), "batch-ideal"]}
#: Figs. 2, 3 and 5: one and three hidden layers of four widths.
_WIDTHS: Grid = {**_PAPER, "hidden": [(width,) * layers for layers in (1, 3) for width in (16, 32, 64, 128)]}
#: Fig. 4 does not say how many hidden layers it has: two, as Table 1.
_ALL_WIDTHS: Grid = {**_PAPER, "hidden": [(2**power,) * 2 for power in range(9)]}
_DEPTHS: Grid = {**_PAPER, "hidden": [(32,) * layers for layers in (2, 5, 10)]}
_PROPORTIONS: Grid = {**PAPERS, "method": having("proportions")}
_ELEMENTWISE: Grid = {**PAPERS, "method": having("elementwise")}

#: Appendix D.3 names what unit-consistent steps should be robust to. Every method has the rates around the best that
#: the sweep found for it; LayerNorm, which is not in the sweep, has those of the plain network. What is compared is
#: held out, since the best of them counts.
_ROBUST: Grid = {"data": "cifar10", "activation": ["leaky-relu"], "epochs": 5, "seeds": 3, "validation": True}
_BEST = [
    ("sgd", "none", 0.03), ("sgd", "batchnorm", 0.01), ("sgd", "layernorm", 0.03), ("sgd", "uc-network", 0.01),
    ("adam", "none", 3e-4), ("adam", "uc-network", 1e-4), ("adam", "uc-layer", 0.01),
]  # fmt: skip


def _robust(**settings: object) -> list[Grid]:
    around = {lr: [float(f"{lr * factor:.1g}") for factor in (1 / 3, 1, 3)] for *_, lr in _BEST}
    return [
        {**_ROBUST, "optimizer": optimizer, "method": method, "lr": around[lr], **settings}
        for optimizer, method, lr in _BEST
    ]


def _along(
    setting: str, help: str, makes: Sequence[Recipe], *grids: Grid,
    reduced: Grid | None = None, page: str = "docs/results/mlp.md",
) -> Study:  # fmt: skip
    return grid_study(help, presets(*grids, reduced=reduced), sweep(setting), makes=makes, page=page)


_robustly = partial(_along, page="docs/results/unit-consistency.md")
_SHORT: Grid = {"epochs": 2, "seeds": 3}
_SIZES, _GAINS, _DEEP = [2, 4, 8, 32, 128], [0.1, 0.3, 1.0, 3.0, 10.0], [(32,) * layers for layers in (2, 5, 10, 20)]
_LONG = "D.3: is a normaliser optional, after convergence"
_SKIPS = "the same with skips around the hidden layers, Appendix B.3"
STUDIES = {
    "fig2": _along(
        "width",
        "Fig. 2: tanh networks of several widths",
        at_lengths("fig2", 30, 6, decides=""),
        {**_WIDTHS, "activation": ["tanh"]},
    ),
    "fig3": _along(
        "width",
        "Fig. 3: the same with leaky ReLU",
        at_lengths("fig3", 30, 6, decides=""),
        {**_WIDTHS, "activation": ["leaky-relu"]},
    ),
    "fig4": _along("width", "Fig. 4: widths from 1 to 256", at_lengths("fig4", 70, 14, decides=""), _ALL_WIDTHS),
    "fig5": _along(
        "width",
        "Fig. 5: networks without an activation",
        at_lengths("fig5", 30, 6, decides=""),
        {**_WIDTHS, "activation": ["identity"]},
    ),
    "depth": _along("depth", "2, 5 and 10 hidden layers", at_lengths("depth", 22, 4), _DEPTHS),
    "residual": _along("depth", _SKIPS, at_lengths("residual", 24, 5), {**_DEPTHS, "network": "residual"}),
    "proportions": _along("method", "the general forms, Eqs. 35 and 37", at_lengths("proportions", 9, 2), _PROPORTIONS),
    "elementwise": _along(
        "method", "DyT, explicit √d and DyISRU in an MLP", at_lengths("elementwise", 7, 1.4, decides=""), _ELEMENTWISE
    ),
    "uc-batch": _robustly(
        "batch",
        "D.3: small batches",
        at_lengths("uc-batch", 9, 4, decides=""),
        *_robust(batch_size=_SIZES),
        reduced=_SHORT,
    ),
    "uc-init": _robustly(
        "gain",
        "D.3: the size of the first parameters",
        at_lengths("uc-init", 2.4, 1, decides=""),
        *_robust(gain=_GAINS),
        reduced=_SHORT,
    ),
    "uc-depth": _robustly(
        "depth", "D.3: depth", at_lengths("uc-depth", 2.6, 1, decides=""), *_robust(hidden=_DEEP), reduced=_SHORT
    ),
    "uc-long": _robustly(
        "rate",
        _LONG,
        at_lengths("uc-long", 5, 1.2, decides=""),
        *_robust(epochs=60),
        reduced={"epochs": 15, "seeds": 3},
    ),
}
