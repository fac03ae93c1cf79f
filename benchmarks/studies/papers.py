"""The papers' other protocols on images: widths, depths, no activation, skips, proportions, and UC's Appendix D.3."""

from ..images.run import Grid
from ..methods import METHODS, PAPERS_OWN
from .comparison import PAPERS, grid_study, presets
from .sweep import sweep

_PAPER: Grid = {**PAPERS, "method": [*PAPERS_OWN, "batch-ideal"]}
#: Figs. 2, 3 and 5: one and three hidden layers of four widths.
_WIDTHS: Grid = {**_PAPER, "hidden": [(width,) * layers for layers in (1, 3) for width in (16, 32, 64, 128)]}
#: Fig. 4 does not say how many hidden layers it has: two, as Table 1.
_ALL_WIDTHS: Grid = {**_PAPER, "hidden": [(2**power,) * 2 for power in range(9)]}
_DEPTHS: Grid = {**_PAPER, "hidden": [(32,) * layers for layers in (2, 5, 10)]}
_FORMS = [name for name in METHODS if name.startswith(("affine-like-", "norm-like-"))]
_PROPORTIONS: Grid = {**PAPERS, "method": ["none", "l2norm", "affine-like", *_FORMS]}
_ELEMENTWISE: Grid = {**PAPERS, "method": ["none", "layernorm", "rmsnorm", "dyt", "dyt-sqrt-d", "dyisru"]}

#: Appendix D.3 names what unit-consistent steps should be robust to. Every method has the rates around the best that
#: the sweep found for it, and what is compared is held out, since the best of them counts.
_ROBUST: Grid = {"data": "cifar10", "activation": ["leaky-relu"], "epochs": 5, "seeds": 3, "validation": True}
_BEST = [
    ("sgd", "none", 0.03), ("sgd", "batchnorm", 0.03), ("sgd", "layernorm", 0.03), ("sgd", "uc-network", 0.01),
    ("adam", "none", 3e-4), ("adam", "uc-network", 1e-4), ("adam", "uc-layer", 0.01),
]  # fmt: skip


def _robust(**settings: object) -> list[Grid]:
    return [
        {
            **_ROBUST,
            "optimizer": optimizer,
            "method": method,
            "lr": [float(f"{lr * factor:.1g}") for factor in (1 / 3, 1, 3)],
            **settings,
        }
        for optimizer, method, lr in _BEST
    ]


_SHORT: Grid = {"epochs": 2, "seeds": 3}
STUDIES = {
    "fig2": grid_study(
        "Fig. 2: tanh networks of several widths", presets({**_WIDTHS, "activation": ["tanh"]}), sweep("width")
    ),
    "fig3": grid_study(
        "Fig. 3: the same with leaky ReLU", presets({**_WIDTHS, "activation": ["leaky-relu"]}), sweep("width")
    ),
    "fig4": grid_study("Fig. 4: widths from 1 to 256", presets(_ALL_WIDTHS), sweep("width")),
    "fig5": grid_study(
        "Fig. 5: networks without an activation", presets({**_WIDTHS, "activation": ["identity"]}), sweep("width")
    ),
    "depth": grid_study("2, 5 and 10 hidden layers", presets(_DEPTHS), sweep("depth")),
    "residual": grid_study(
        "the same with skips around the hidden layers, Appendix B.3",
        presets({**_DEPTHS, "network": "residual"}), sweep("depth"),
    ),
    "proportions": grid_study("the general forms, Eqs. 35 and 37", presets(_PROPORTIONS), sweep("method")),
    "elementwise": grid_study("DyT, explicit √d and DyISRU in an MLP", presets(_ELEMENTWISE), sweep("method")),
    "uc-batch": grid_study(
        "D.3: small batches", presets(*_robust(batch_size=[2, 4, 8, 32, 128]), reduced=_SHORT), sweep("batch")
    ),
    "uc-init": grid_study(
        "D.3: the size of the first parameters", presets(*_robust(gain=[0.1, 0.3, 1.0, 3.0, 10.0]), reduced=_SHORT),
        sweep("gain"),
    ),
    "uc-depth": grid_study(
        "D.3: depth", presets(*_robust(hidden=[(32,) * layers for layers in (2, 5, 10, 20)]), reduced=_SHORT),
        sweep("depth"),
    ),
    "uc-long": grid_study(
        "D.3: is a normaliser optional, after convergence",
        presets(*_robust(epochs=60), reduced={"epochs": 15, "seeds": 3}), sweep("rate"),
    ),
}  # fmt: skip
