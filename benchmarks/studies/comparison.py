"""Methods side by side at one rate: the table of accuracies and prices, and the figure of accuracy by epoch."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.figure import band, panels
from ..core.store import Result, setting
from ..core.study import Recipe, apart
from ..core.tables import Section, estimate, exact, in_order, pivot
from ..grids import CNN, CNN_POOL, COMPARED, PAPERS, Grid, grid_study, presets
from ..methods import METHODS
from ..problems.images import ACTIVATIONS, BACKENDS, network, trained

#: A method and its damping, unless that is its own.
_arm = setting("method", "damping")
#: Points below the best that the second panel of an activation shows.
END = 5.0


def _section(group: list[Result], name: str, folder: Path) -> Section:
    """Table and figure of one protocol: data, network, batch size, rate, length and device."""
    group = sorted(group, key=lambda r: -list(ACTIVATIONS).index(r["settings"]["activation"]))
    shown = {(_arm(r), r["settings"]["activation"]): r for r in group}
    arms = sorted({arm for arm, _ in shown}, key=lambda arm: (list(METHODS).index(arm[0]), arm[1] or 0))
    labels = {(name, own): METHODS[name].label + (f", damping {own:g}" if own else "") for name, own in arms}
    settings = group[-1]["settings"]
    title = f"{network(group[-1])}, {settings['optimizer']} {settings['lr']:g}, {settings['device']}"
    _figure(shown, labels, title, folder / f"{name}.png")
    caption = f"Test accuracy after the last epoch; time per step and seed, training only. {trained(group[-1:])}"
    # The price of one step of one seed is from the median epoch, on the first of the activations.
    columns = {each: f"{each}, %" for each in ACTIVATIONS} | {each: f"{each}, ms/step" for each in BACKENDS}
    cells = {key: estimate(result["test_accuracy"][-1]) for key, result in shown.items()}
    for r in group:
        steps = r["steps_per_epoch"] * len(r["settings"]["seeds"])
        price = exact(1e3 * statistics.median_high(r["seconds"]) / steps, ".2f")
        cells[_arm(r), r["settings"]["backend"]] = price
    return Section([f"**{title}**", pivot(["method"], labels, columns, cells), caption])


def _figure(shown: Mapping[tuple[Any, str], Result], labels: Mapping[Any, str], title: str, path: Path) -> None:
    """Draw test accuracy against epoch, whole and near its end, one column per activation, bands of an error."""
    activations = in_order(ACTIVATIONS, (activation for _, activation in shown))
    names = [*activations, *(f"{activation}, the end" for activation in activations)]
    columns, look = max(2, len(activations)), {"xlabel": "epoch", "ylabel": "test accuracy, %"}
    with panels(names, title, path, columns=columns, height=2.9, sharey=False, **look) as axes:
        for place, activation in enumerate(activations):
            both, ends = (axes[place], axes[place + len(activations)]), []
            for arm in [arm for arm in labels if (arm, activation) in shown]:
                method, accuracies = METHODS[arm[0]], shown[arm, activation]["test_accuracy"]
                # Gradient-only is dashed, coordinates dotted as well: colour alone does not carry to everyone.
                style = "--" if method.correction else "-." if method.by_inputs is not None or method.gauge else "-"
                epochs = range(1, len(accuracies) + 1)
                for axis in both:
                    band(axis, epochs, accuracies, style, color=method.color, label=labels[arm], linewidth=1.6)
                    axis.xaxis.get_major_locator().set_params(integer=True)
                ends.append(statistics.fmean(accuracies[-1]))
            both[1].set(xlim=(len(epochs) / 2, len(epochs)), ylim=(max(ends) - END, max(ends) + 0.1 * END))


_REPORT = apart(_section, "method", "activation", "backend", "seeds", "damping")
_DIGITS = {**PAPERS, "data": "digits"}
_CONVOLUTIONS: Grid = {
    "data": "cifar10", "activation": ["leaky-relu"], "backend": "loop",
    "method": [*COMPARED, "l2-patch", "l2-patch-half", "whitened-16"],
}  # fmt: skip
_CNN, _CNN_POOL = ({**_CONVOLUTIONS, **each} for each in (CNN, CNN_POOL))
_SHORT = {"epochs": 15, "seeds": 3}

_MLP_PAGE, _CNN_PAGE = "docs/results/mlp.md", "docs/results/convolutions.md"
#: A tenth of the paper's length.
_TEN_EPOCHS = "--preset reduced --epochs 10 --batch-size 128"
#: On the two at the top a claim hangs: they have five seeds.
_AT_THE_TOP = ["batchnorm", "layernorm"]
_OTHERS = [name for name in _CONVOLUTIONS["method"] if name not in _AT_THE_TOP]
STUDIES = {
    "digits": grid_study(
        "all methods on the embedded digits; minutes", [_DIGITS], _REPORT,
        makes=[Recipe(0.02)], data="", page=_MLP_PAGE,
    ),
    "cifar10": grid_study(
        "the same on CIFAR-10", [PAPERS], _REPORT, makes=[Recipe(0.7)], page=_MLP_PAGE
    ),
    "cnn-pool": grid_study(
        "convolutions and global average pooling, Fig. 8", presets([_CNN_POOL], [{**_CNN_POOL, **_SHORT}]), _REPORT,
        makes=[Recipe(1.0, options=(_TEN_EPOCHS,))], page=_CNN_PAGE,
    ),
    "cnn": grid_study(
        "convolutions without pooling, Fig. 9", presets([_CNN], [{**_CNN, **_SHORT}]), _REPORT, page=_CNN_PAGE,
        makes=[Recipe(1.2, options=(
            f"{_TEN_EPOCHS} --methods {' '.join(_OTHERS)}",
            f"{_TEN_EPOCHS} --methods {' '.join(_AT_THE_TOP)} --seeds 5",
        ))],
    ),
    "compare": grid_study("any methods, data and settings; give it a --name", [_DIGITS], _REPORT),
}  # fmt: skip
