"""Does blindness to units pay: accuracy by learning rate, and of one network in several gauges."""

import statistics
from itertools import product
from pathlib import Path
from typing import Any

from ..core.figure import band, panels, shade
from ..core.store import Result, setting
from ..core.study import Recipe, apart
from ..core.table import Cell, Row, Section, Table, estimate, exact, grouped, in_order, mean_and_error, pivot
from ..images.optimizers import OPTIMIZERS
from ..images.run import SMOKE
from ..methods import METHODS
from .comparison import grid_study, network

_SWEPT = {"data": "cifar10", "activation": ["leaky-relu"], "epochs": 5, "seeds": 3, "validation": True}
#: The layer gauge wants rates of its own, since typical canonical weights are about 1.
_SWEEP = [
    {**_SWEPT, "optimizer": optimizer, "method": methods, "lr": rates}
    for optimizer, methods, rates in (
        ("adam", ["none", "uc-network"], [3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]),
        ("adam", ["uc-layer"], [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]),
        ("sgd", ["none", "uc-network", "batchnorm"], [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]),
        ("sgd", ["uc-layer"], [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]),
        ("momentum", ["none", "uc-network"], [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3]),
        ("momentum", ["uc-layer"], [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]),
    )
]

_ONE = {"data": "cifar10", "activation": ["leaky-relu"], "epochs": 5, "rescaled": [0.0, 0.5, 1.0, 2.0]}
_RESCALED = [
    {**_ONE, "optimizer": optimizer, "method": method, "lr": lr}
    for optimizer, rates in (
        ("sgd", {"none": 0.03, "uc-network": 0.01, "batchnorm": 0.01}),
        ("adam", {"none": 3e-4, "uc-network": 1e-4, "uc-layer": 0.01}),
    )
    for method, lr in rates.items()
]

#: Rates count as good if they come this near to the best one, in points.
NEAR = 2.0


def _sweep(results: list[Result], name: str, folder: Path) -> Section:
    """Heading, table, figure and caption."""
    settings = results[0]["settings"]
    found = grouped(sorted(results, key=setting("lr")), setting("optimizer", "method"))
    optimizers = in_order(OPTIMIZERS, map(setting("optimizer"), results))
    where = "a tenth of the training set, held out" if settings.get("validation") else "the test set"
    heading = f"{network(results[0])}, {settings['activation']}, accuracy by learning rate"
    title, path, rows = f"{heading}, {settings['epochs']} epochs", folder / f"{name}.png", list[Row]()
    with panels(optimizers, title, path, xlabel="learning rate", xscale="log", ylabel="accuracy, %") as axes:
        for axis, optimizer in zip(axes, optimizers, strict=True):
            for method in in_order(METHODS, (key[1] for key in found if key[0] == optimizer)):
                curve = {r["settings"]["lr"]: r["test_accuracy"][-1] for r in found[optimizer, method]}
                look = METHODS[method]
                band(axis, list(curve), list(curve.values()), "o-", markersize=4, color=look.color, label=look.label)
                # A run that diverged to NaN counts as guessing does.
                means = {rate: mean_and_error(found)[0] for rate, found in curve.items()}
                top = max(means, key=means.__getitem__)
                near = ", ".join(f"{rate:g}" for rate, mean in means.items() if mean >= means[top] - NEAR)
                edge = ", at the sweep's edge" if top in (min(curve), max(curve)) else ""
                rate = Cell(f"{top:g}{edge}", {"": top})
                rows.append([optimizer, look.label, rate, estimate(curve[top]), near])
    header = ["optimizer", "method", "best learning rate", "accuracy there, %", f"others within {NEAR:g} points"]
    counts = sorted({len({r["settings"]["lr"] for r in curve}) for curve in found.values()})
    caption = (
        f"Accuracy on {where}, after {settings['epochs']} epochs at a constant rate, mean ± standard error over "
        f"{len(settings['seeds'])} seeds. Every method has {' or '.join(map(str, counts))} learning rates, a factor "
        f"of about three apart. torch {results[0]['environment']['torch']}."
    )
    return Section([f"**{heading}**", Table(header, rows), caption])


def _rescaled(results: list[Result], name: str, folder: Path) -> Section:
    """Heading, table, figure and caption."""
    settings, rows, cells = results[0]["settings"], dict[Any, Row](), dict[Any, Cell]()
    found = grouped(sorted(results, key=setting("rescaled")), setting("optimizer", "method"))
    sigmas = sorted({r["settings"]["rescaled"] for r in results})
    heading = f"{network(results[0])}, {settings['activation']}, hidden units rescaled at random"
    with panels([f"{settings['epochs']} epochs"], heading, folder / f"{name}.png") as (axis,):
        for optimizer, method in product(OPTIMIZERS, METHODS):
            if runs := found.get((optimizer, method)):
                gauges = {r["settings"]["rescaled"]: r["test_accuracy"][-1] for r in runs}
                label, color = f"{METHODS[method].label}, {optimizer}", METHODS[method].color
                style = {"sgd": "-", "momentum": ":", "adam": "--"}[optimizer]
                means = [statistics.fmean(each) for each in gauges.values()]
                axis.plot(list(gauges), means, style, marker="o", markersize=4, color=color, label=label)
                low, high = ([end(each) for each in gauges.values()] for end in (min, max))
                shade(axis, list(gauges), low, high, color, "band: lowest to highest gauge")
                rows[label] = [label, exact(runs[-1]["settings"]["lr"])]
                cells |= {(label, sigma): _gauges(values) for sigma, values in gauges.items()}
        axis.set(xlabel="σ of the log-scales", ylabel="test accuracy, %", xticks=sigmas)
    caption = (
        f"Test accuracy after {settings['epochs']} epochs of one network in {len(settings['seeds'])} gauges: mean, and "
        "in brackets the lowest and the highest. All start as the same function and see the same batches. Learning "
        "rates were chosen by the sweep, for the network as PyTorch initialises it. "
        f"torch {results[0]['environment']['torch']}."
    )
    columns = {sigma: f"σ = {sigma:g}" for sigma in sigmas}
    return Section([f"**{heading}**", pivot(["method, optimizer", "learning rate"], rows, columns, cells), caption])


def _gauges(values: list[float]) -> Cell:
    mean, low, high = statistics.fmean(values), min(values), max(values)
    numbers = {"": mean, "lowest": low, "highest": high, "n": len(values)}
    return Cell(f"{mean:.2f} ({low:.2f} to {high:.2f})", numbers)


#: What runs of one section may differ in.
_WITHIN = "optimizer", "method", "lr", "rescaled", "backend"
_PAGE = "docs/results/unit-consistency.md"
STUDIES = {
    "uc-sweep": grid_study(
        "unit-consistent optimizers over learning rates", _SWEEP, apart(_sweep, *_WITHIN),
        makes=[Recipe(1.1, decides="--seeds 10")], page=_PAGE,
    ),
    "uc-rescaled": grid_study(
        "one network in several gauges", _RESCALED, apart(_rescaled, *_WITHIN),
        makes=[Recipe(0.8)], page=_PAGE, smoke=f"{SMOKE} --lr 0.1 --rescaled 0.5 --batch-size 8",
    ),
}  # fmt: skip
