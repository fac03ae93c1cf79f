"""Does blindness to units pay: accuracy by learning rate, and of one network in several gauges."""

from itertools import product
from pathlib import Path

from ..core.figure import band, panels, shade
from ..core.store import Result
from ..core.study import Sections
from ..core.table import in_order, markdown, mean_and_error, plus_minus
from ..images.run import OPTIMIZERS
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
    for optimizer, method, lr in (
        ("sgd", "none", 0.03),
        ("sgd", "uc-network", 0.01),
        ("sgd", "batchnorm", 0.01),
        ("adam", "none", 3e-4),
        ("adam", "uc-network", 1e-4),
        ("adam", "uc-layer", 0.01),
    )
]

#: Rates count as good if they come this near to the best one, in points.
NEAR = 2.0

#: (method, optimizer) → rate → accuracies after the last epoch.
Curves = dict[tuple[str, str], dict[float, list[float]]]


def _sweep(results: list[Result], name: str, folder: Path) -> Sections:
    """Heading, table, figure and caption."""
    found, settings = Curves(), results[0]["settings"]
    for run in sorted(({**r["settings"], "found": r["test_accuracy"][-1]} for r in results), key=lambda run: run["lr"]):
        found.setdefault((run["method"], run["optimizer"]), {})[run["lr"]] = run["found"]
    optimizers = in_order(OPTIMIZERS, (key[1] for key in found))
    where = "a tenth of the training set, held out" if settings.get("validation") else "the test set"
    heading = f"{network(results[0])}, {settings['activation']}, accuracy by learning rate"
    rows = []
    for optimizer in optimizers:
        for method in in_order(METHODS, (key[0] for key in found if key[1] == optimizer)):
            curve = found[method, optimizer]
            # A run that diverged to NaN counts as guessing does.
            means = {rate: mean_and_error(found)[0] for rate, found in curve.items()}
            top = max(means, key=means.__getitem__)
            near = [rate for rate, mean in means.items() if mean >= means[top] - NEAR]
            edge = ", at the sweep's edge" if top in (min(curve), max(curve)) else ""
            cells = [f"{top:g}{edge}", plus_minus(curve[top]), ", ".join(f"{rate:g}" for rate in near)]
            rows.append([optimizer, METHODS[method].label, *cells])
    title = f"{heading}, {settings['epochs']} epochs"
    with panels(optimizers, title, folder / f"{name}.png") as axes:
        for axis, optimizer in zip(axes, optimizers, strict=True):
            for method in in_order(METHODS, (key[0] for key in found if key[1] == optimizer)):
                accuracies, look = found[method, optimizer], METHODS[method]
                x, y = list(accuracies), list(accuracies.values())
                band(axis, x, y, "o-", markersize=4, color=look.color, label=look.label)
            axis.set(xlabel="learning rate", xscale="log")
        axes[0].set_ylabel("accuracy, %")
    header = ["optimizer", "method", "best rate", "accuracy there, %", f"rates within {NEAR:g} points of it"]
    counts = sorted({len(curve) for curve in found.values()})
    caption = (
        f"Accuracy on {where}, after {settings['epochs']} epochs at a constant rate, mean ± standard error over "
        f"{len(settings['seeds'])} seeds. Every method has {' or '.join(map(str, counts))} rates, a factor of about "
        f"three apart. torch {results[0]['environment']['torch']}."
    )
    return {name: f"**{heading}**\n\n{markdown(header, rows)}\n\n{caption}"}


#: (method, optimizer) → σ → accuracy of every gauge after the last epoch.
Series = dict[tuple[str, str], dict[float, list[float]]]


def _rescaled(results: list[Result], name: str, folder: Path) -> Sections:
    """Heading, table, figure and caption."""
    found, settings = Series(), results[0]["settings"]
    runs = sorted((r["settings"] | {"found": r["test_accuracy"][-1]} for r in results), key=lambda run: run["rescaled"])
    for optimizer, method in product(OPTIMIZERS, METHODS):
        for run in runs:
            if (run["method"], run["optimizer"]) == (method, optimizer):
                found.setdefault((method, optimizer), {})[run["rescaled"]] = run["found"]
    sigmas = sorted({sigma for by_sigma in found.values() for sigma in by_sigma})
    rates = {(r["settings"]["method"], r["settings"]["optimizer"]): r["settings"]["lr"] for r in results}
    labels = {key: f"{METHODS[key[0]].label}, {key[1]}" for key in found}
    heading = f"{network(results[0])}, {settings['activation']}, hidden units rescaled at random"
    rows = [
        [labels[key], f"{rates[key]:g}", *(_cell(by_sigma.get(sigma)) for sigma in sigmas)]
        for key, by_sigma in found.items()
    ]
    with panels([f"{settings['epochs']} epochs"], heading, folder / f"{name}.png") as (axis,):
        for (method, optimizer), by_sigma in found.items():
            ends = [(min(values), sum(values) / len(values), max(values)) for values in by_sigma.values()]
            low, middle, high = zip(*ends, strict=True)
            style = {"sgd": "-", "momentum": ":", "adam": "--"}[optimizer]
            look = {"color": METHODS[method].color, "label": labels[method, optimizer]}
            axis.plot(list(by_sigma), middle, style, marker="o", markersize=4, **look)
            shade(axis, list(by_sigma), low, high, METHODS[method].color, "band: lowest to highest gauge")
        axis.set(xlabel="σ of the log-scales", ylabel="test accuracy, %", xticks=sigmas)
    caption = (
        f"Test accuracy after {settings['epochs']} epochs of one network in {len(settings['seeds'])} gauges: mean, and "
        "in brackets the lowest and the highest. All start as the same function and see the same batches. Rates were "
        "chosen by the sweep, for the network as PyTorch initialises it. "
        f"torch {results[0]['environment']['torch']}."
    )
    header = ["method, optimizer", "rate", *(f"σ = {sigma:g}" for sigma in sigmas)]
    return {name: f"**{heading}**\n\n{markdown(header, rows)}\n\n{caption}"}


def _cell(values: list[float] | None) -> str:
    return f"{sum(values) / len(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""


STUDIES = {
    "uc-sweep": grid_study("unit-consistent optimizers over learning rates", _SWEEP, _sweep),
    "uc-rescaled": grid_study("one network in several gauges", _RESCALED, _rescaled),
}
