"""Does blindness to units pay: accuracy against the learning rate, of unit-consistent optimizers and plain ones."""

from collections import defaultdict
from pathlib import Path

from ..core.figure import panels
from ..core.store import Result
from ..core.study import Sections
from ..core.table import in_order, markdown, mean_and_error
from ..images.run import OPTIMIZERS
from ..methods import METHODS
from .images import grid_study, network

#: Rates count as good if they come this near to the best one, in points.
NEAR = 2.0

#: (method, optimizer) → rate → accuracy after the last epoch: mean and error over seeds.
Curves = dict[tuple[str, str], dict[float, tuple[float, float]]]


def report(results: list[Result], name: str, folder: Path) -> Sections:
    """Heading, table, figure and caption."""
    found, settings = _curves(results), results[0]["settings"]
    optimizers = in_order(OPTIMIZERS, (key[1] for key in found))
    where = "a tenth of the training set, held out" if settings.get("validation") else "the test set"
    heading = f"{network(results[0])}, {settings['activation']}, accuracy by learning rate"
    rows = []
    for optimizer in optimizers:
        for method in in_order(METHODS, (key[0] for key in found if key[1] == optimizer)):
            curve = found[method, optimizer]
            # A run that diverged to NaN counts as guessing does.
            top = max(curve, key=lambda rate: curve[rate][0])
            near = [rate for rate in curve if curve[rate][0] >= curve[top][0] - NEAR]
            edge = ", at the sweep's edge" if top in (min(curve), max(curve)) else ""
            cells = [f"{top:g}{edge}", "{:.2f} ± {:.2f}".format(*curve[top]), ", ".join(f"{rate:g}" for rate in near)]
            rows.append([optimizer, METHODS[method].label, *cells])
    _figure(found, optimizers, f"{heading}, {settings['epochs']} epochs", folder / f"{name}.png")
    header = ["optimizer", "method", "best rate", "accuracy there, %", f"rates within {NEAR:g} points of it"]
    counts = sorted({len(curve) for curve in found.values()})
    caption = (
        f"Accuracy on {where}, after {settings['epochs']} epochs at a constant rate, mean ± standard error over "
        f"{len(settings['seeds'])} seeds. Every method has {' or '.join(map(str, counts))} rates, a factor of about "
        f"three apart. torch {results[0]['environment']['torch']}."
    )
    return {name: f"**{heading}**\n\n{markdown(header, rows)}\n\n{caption}"}


def _curves(results: list[Result]) -> Curves:
    found: Curves = defaultdict(dict)
    for result in sorted(results, key=lambda r: r["settings"]["lr"]):
        settings = result["settings"]
        found[settings["method"], settings["optimizer"]][settings["lr"]] = mean_and_error(result["test_accuracy"][-1])
    return found


def _figure(found: Curves, optimizers: list[str], title: str, path: Path) -> None:
    with panels(optimizers, title, path) as axes:
        for axis, optimizer in zip(axes, optimizers, strict=True):
            for name in in_order(METHODS, (key[0] for key in found if key[1] == optimizer)):
                method, curve = METHODS[name], found[name, optimizer]
                means, errors = zip(*curve.values(), strict=True)
                axis.errorbar(
                    list(curve), means, errors, color=method.color, marker="o", markersize=4, label=method.label
                )
            axis.set(xlabel="learning rate", xscale="log")
        axes[0].set_ylabel("accuracy, %")


_ALL = {"data": "cifar10", "activation": ["leaky-relu"], "epochs": 5, "seeds": 3, "validation": True}
#: The layer gauge wants rates of its own, since typical canonical weights are about 1.
_GRIDS = [
    {**_ALL, "optimizer": optimizer, "method": methods, "lr": rates}
    for optimizer, methods, rates in (
        ("adam", ["none", "uc-network"], [3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]),
        ("adam", ["uc-layer"], [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]),
        ("sgd", ["none", "uc-network", "batchnorm"], [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]),
        ("sgd", ["uc-layer"], [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]),
        ("momentum", ["none", "uc-network"], [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3]),
        ("momentum", ["uc-layer"], [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]),
    )
]

STUDIES = {"uc-sweep": grid_study("unit-consistent optimizers over learning rates", _GRIDS, report)}
