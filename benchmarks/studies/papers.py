"""The papers' protocols on images: widths, depths, proportions, UC's gauges and D.3."""

import statistics
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..core.figure import bars, panels
from ..core.store import Result
from ..core.study import UNTRIED, Recipe, Report, Study, apart
from ..core.tables import Section, estimate, pivot
from ..grids import OF_PAPER, PAPERS, SMOKE, Grid, grid_study, presets
from ..methods import METHODS
from ..problems.images import subject, trained

#: What columns and horizontal axes are → its label there.
ALONG = {
    "width": "width of the hidden layers", "depth": "hidden layers", "batch": "batch size", "rate": "learning rate",
    "gain": "factor on all parameters at first", "rescaled": "σ of the log-scales", "method": "",
}  # fmt: skip
#: What tells panels of a figure apart, and groups of rows of a table → what their names say of it.
_PANEL = {"activation": "{}", "optimizer": "{}", "batch": "batch {}", "depth": "{} hidden", "width": "width {}"}
_MLP_PAGE, _UC_PAGE = "docs/results/mlp.md", "docs/results/unit-consistency.md"


def sweep(along: str) -> Report:
    """A report of runs along a setting; where runs differ in nothing but their rate, the best of them counts."""
    within = "method", "activation", "optimizer", "hidden", "batch_size", "lr", "gain", "rescaled", "backend", "device"
    return apart(partial(_section, along), *within)


#: Panel → method → place along the setting → results.
Cells = dict[str, dict[str, dict[float, list[Result]]]]


def _place(result: Result) -> dict[str, Any]:
    """Where a run stands, by all that `ALONG` and `_PANEL` name."""
    s = result["settings"]
    sizes = {"batch": s["batch_size"], "depth": len(s["hidden"]), "width": s["hidden"][0]}
    return {**s, **sizes, "rate": s["lr"], "gain": s.get("gain", 1.0), "method": 0.0}


def cells(results: list[Result], along: str) -> Cells:
    """Sort results into panels, methods and places; parts of a panel's name that all panels share are left out."""
    telling = [name for name in _PANEL if name != along and len({_place(r)[name] for r in results}) > 1]
    found: Cells = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for result in sorted(results, key=lambda r: list(METHODS).index(r["settings"]["method"])):
        place = _place(result)
        panel = ", ".join(_PANEL[name].format(place[name]) for name in telling)
        found[panel][result["settings"]["method"]][float(place[along])].append(result)
    return found


def best(results: list[Result]) -> list[float]:
    """The accuracy of every seed after the last epoch, at the best of the rates that there are."""
    return max((r["test_accuracy"][-1] for r in results), key=statistics.fmean)


def _section(along: str, results: list[Result], name: str, folder: Path) -> Section:
    found, label, settings = cells(results, along), ALONG[along], results[0]["settings"]
    rows = {(panel, method): [*([panel] * (len(found) > 1)), METHODS[method].label]
            for panel, methods in found.items() for method in methods}  # fmt: skip
    at = {((panel, method), place): runs for panel, method in rows for place, runs in found[panel][method].items()}
    columns = {place: f"{place:g}" if label else "%" for place in sorted({place for _, place in at})}
    head = [*([""] * (len(found) > 1)), "method"]
    table = pivot(head, rows, columns, {key: estimate(best(runs)) for key, runs in at.items()})
    length = f"{settings['epochs']} epoch{'s' * (settings['epochs'] > 1)}"
    title = f"{subject(results)}, {settings['activation']}, {length}"
    if label:
        title += f": accuracy by {label}"
        _figure(found, along, title, folder / f"{name}.png")
    caption = f"Mean ± standard error, at the best of the rates that there are. {trained(results)}"
    return Section([f"**{title}**", table, caption])


def _figure(found: Cells, along: str, title: str, path: Path) -> None:
    scale = "linear" if along == "rescaled" else "log"  # the deviations begin at 0
    with panels(list(found), title, path, xlabel=ALONG[along], xscale=scale, ylabel="accuracy, %") as axes:
        for axis, methods in zip(axes, found.values(), strict=True):
            for name, by_place in methods.items():
                bars(axis, {place: best(by_place[place]) for place in sorted(by_place)}, METHODS[name])
            places = sorted({place for by_place in methods.values() for place in by_place})
            axis.set_xscale(scale)
            if len(places) <= 7:  # of more the labels would touch
                # One that is close behind another would be written over it.
                pairs = pairwise([-1.0, *places])
                axis.set_xticks(places, [f"{place:g}" if place > 1.2 * before else "" for before, place in pairs])
                axis.minorticks_off()


_SWEPT: Grid = {"data": "cifar10", "activation": ["leaky-relu"], "epochs": 5, "seeds": 3, "validation": True}
#: Rates of sweeps, by optimizer; canonical weights are about 1, so that the layer gauge wants rates of its own.
_PLAIN = {
    "adam": [3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1], "sgd": [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0],
    "momentum": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3],
}  # fmt: skip
_CANONICAL = {
    "adam": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1], "sgd": [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0],
    "momentum": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
}  # fmt: skip
#: Method → rates by optimizer.
_SWEEPS = {"none": _PLAIN, "batchnorm": {"sgd": _PLAIN["sgd"]}, "uc-network": _PLAIN, "uc-layer": _CANONICAL}
_SWEEP: list[Grid] = [
    {**_SWEPT, "optimizer": optimizer, "method": name, "lr": rates}
    for name, by_optimizer in _SWEEPS.items() for optimizer, rates in by_optimizer.items()
]  # fmt: skip
#: Method, optimizer, and the best of its rates; LayerNorm, which is not in the sweep, has that of the plain network.
_BEST = [
    ("none", "sgd", 0.03), ("none", "adam", 3e-4), ("batchnorm", "sgd", 0.01), ("layernorm", "sgd", 0.03),
    ("uc-network", "sgd", 0.01), ("uc-network", "adam", 1e-4), ("uc-layer", "adam", 0.01),
]  # fmt: skip
_ONE: Grid = {"data": "cifar10", "activation": ["leaky-relu"], "epochs": 5, "rescaled": [0.0, 0.5, 1.0, 2.0]}
_RESCALED: list[Grid] = [
    {**_ONE, "optimizer": optimizer, "method": name, "lr": lr} for name, optimizer, lr in _BEST if name in _SWEEPS
]

_PROPORTIONS = [
    "none", "l2norm", "affine-like", *(f"affine-like-{beta:g}" for beta in (0.25, 0.5, 2.0, 4.0)),
    *(f"norm-like-{beta:g}" for beta in (0.1, 0.5, 0.9)),
]  # fmt: skip
_ELEMENTWISE = ["none", "layernorm", "rmsnorm", "dyt", "dyt-sqrt-d", "dyisru"]
_PAPER: Grid = {**PAPERS, "method": [*OF_PAPER, "batch-ideal"]}
#: Figs. 2, 3 and 5: one and three hidden layers of four widths.
_WIDTHS: Grid = {**_PAPER, "hidden": [(width,) * layers for layers in (1, 3) for width in (16, 32, 64, 128)]}
#: Fig. 4 does not say how many hidden layers it has: two, as Table 1.
_ALL_WIDTHS: Grid = {**_PAPER, "hidden": [(2**power,) * 2 for power in range(9)]}
_DEPTHS: Grid = {**_PAPER, "hidden": [(32,) * layers for layers in (2, 5, 10)]}
#: The papers' own methods: of some figures at fewer widths, of the others for a tenth of the epochs, with tanh.
_FEWER: Grid = {**PAPERS, "epochs": 100, "seeds": 5, "method": OF_PAPER}
_FOUR: Grid = {**_FEWER, "hidden": [(width,) * layers for layers in (1, 3) for width in (16, 64)]}
_TANH: Grid = {**_FEWER, "epochs": 10, "activation": ["tanh"]}
#: With the corrections of Eqs. 20 and 21, which the paper tests at no depth.
_SHORTER_DEPTHS: Grid = {
    **_TANH, "hidden": _DEPTHS["hidden"], "seeds": 3, "method": [*OF_PAPER, "proportional", "disproportional"],
}  # fmt: skip


def _robust(around: tuple[float, ...] = (1 / 3, 1, 3), **settings: object) -> list[Grid]:
    """Of Appendix D.3, which names what unit-consistent steps should be robust to.

    Every method has the rates around its best. What is compared is held out, since the best of them counts.
    """
    return [
        {**_SWEPT, "optimizer": optimizer, "method": name, "lr": [float(f"{lr * by:.1g}") for by in around], **settings}
        for name, optimizer, lr in _BEST
    ]  # fmt: skip


def _of_sgd(grids: list[Grid], **shorter: object) -> list[Grid]:
    """Those with SGD, but LayerNorm, at a reduced length."""
    return [{**grid, **shorter} for grid in grids if grid["optimizer"] == "sgd" and grid["method"] != "layernorm"]


_FEW_BATCHES, _GAINS = _robust(batch_size=[2, 4, 8, 32, 128]), _robust(gain=[0.1, 0.3, 1.0, 3.0, 10.0])
_DEEP = _robust(hidden=[(32,) * layers for layers in (2, 5, 10, 20)])
_LONG = _robust((1 / 10, 1 / 3, 1, 3, 10), epochs=60)

#: Name → the setting along which accuracies are shown, what is compared, hours at reduced length, grids, reduced ones.
#: The hours of elementwise are those of a machine with many other programs.
_PROTOCOLS: dict[str, tuple[str, str, float, list[Grid], list[Grid]]] = {
    "fig2": ("width", "Fig. 2: tanh networks of several widths", 2.6,
        [{**_WIDTHS, "activation": ["tanh"]}], [{**_FOUR, "activation": ["tanh"]}]),
    "fig3": ("width", "Fig. 3: the same with leaky ReLU", 3.5,
        [{**_WIDTHS, "activation": ["leaky-relu"]}], [{**_FOUR, "activation": ["leaky-relu"]}]),
    "fig4": ("width", "Fig. 4: widths from 1 to 256", 2.7,
        [_ALL_WIDTHS], [{**_FEWER, "activation": ["tanh"], "hidden": [(4**power,) * 2 for power in range(4)]}]),
    "fig5": ("width", "Fig. 5: networks without an activation", 2.6,
        [{**_WIDTHS, "activation": ["identity"]}], [{**_FOUR, "activation": ["identity"]}]),
    "depth": ("depth", "2, 5 and 10 hidden layers", 0.3, [_DEPTHS], [_SHORTER_DEPTHS]),
    "residual": ("depth", "the same with skips around the hidden layers, Appendix B.3", 0.3,
        [{**_DEPTHS, "network": "residual"}], [{**_SHORTER_DEPTHS, "network": "residual"}]),
    "proportions": ("method", "the general forms, Eqs. 35 and 37", 0.6,
        [{**PAPERS, "method": _PROPORTIONS}], [{**_TANH, "epochs": 30, "method": _PROPORTIONS}]),
    "elementwise": ("method", "DyT, explicit √d and DyISRU in an MLP", 1.0,
        [{**PAPERS, "method": _ELEMENTWISE}], [{**_TANH, "epochs": 30, "method": _ELEMENTWISE}]),
    "uc-batch": ("batch", "D.3: small batches", 0.15,
        _FEW_BATCHES, _of_sgd(_FEW_BATCHES, epochs=1, batch_size=[4, 8, 32, 128])),
    "uc-init": ("gain", "D.3: the size of the first parameters", 0.15, _GAINS, _of_sgd(_GAINS, epochs=2)),
    "uc-depth": ("depth", "D.3: depth", 0.5, _DEEP, _of_sgd(_DEEP, epochs=2)),
    "uc-long": ("rate", "D.3: is a normaliser optional, after convergence", 1.0, _LONG, _of_sgd(_LONG, epochs=30)),
}  # fmt: skip

#: Figures that ran by panels, some on a GPU → the device and the layers of each.
_PANELS = {
    "fig2": ["cuda --hidden 16", "cuda --hidden 64", "cpu --hidden 16 16 16", "cpu --hidden 64 64 64"],
    "fig3": [
        "cuda --hidden 16", "cuda --hidden 64 --methods none batchnorm layernorm",
        "cpu --hidden 64 --methods rmsnorm l2norm l2norm-half affine-like", "cpu --hidden 16 16 16",
        "cpu --hidden 64 64 64",
    ],
    "fig5": [
        "cpu --hidden 16", "cpu --hidden 16 16 16", "cpu --hidden 64 --methods none batchnorm rmsnorm l2norm",
        "cpu --hidden 64 64 64 --methods none batchnorm l2norm",
    ],
}  # fmt: skip


def _study(name: str) -> Study:
    setting, help, hours, grids, shorter = _PROTOCOLS[name]
    options = [f"--preset reduced --device {panel}" for panel in _PANELS.get(name, ())] or ["--preset reduced"]
    makes, page = [Recipe(hours, options=options)], _UC_PAGE if "uc-" in name else _MLP_PAGE
    return grid_study(help, presets(grids, shorter), sweep(setting), makes=makes, page=page)


#: Which rates train plain SGD, with BatchIdeal as it is by default and without it, whatever the batch size.
_DEFAULTS = {
    "data": "digits", "method": ["none", "batch-ideal-default"], "activation": ["tanh"], "optimizer": "sgd",
    "lr": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0], "batch_size": [8, 32, 128], "epochs": 10, "seeds": 3,
}  # fmt: skip
STUDIES = {
    "rates": grid_study(
        "rates that train SGD with and without BatchIdeal; minutes", [_DEFAULTS], sweep("rate"),
        makes=[Recipe(0.2)], data="", smoke=UNTRIED, page=_MLP_PAGE,
    ),
    **{name: _study(name) for name in _PROTOCOLS},
    "uc-sweep": grid_study(
        "unit-consistent optimizers over learning rates", _SWEEP, sweep("rate"), makes=[Recipe(1.1)], page=_UC_PAGE
    ),
    "uc-rescaled": grid_study(
        "one network in several gauges", _RESCALED, sweep("rescaled"), makes=[Recipe(0.8)], page=_UC_PAGE,
        smoke=f"{SMOKE} --lr 0.1 --rescaled 0.5 --batch-size 8",
    ),
}  # fmt: skip
