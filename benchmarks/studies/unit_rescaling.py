"""One network in several gauges: what rescaling its hidden units does to training."""

from pathlib import Path

from ..core.figure import panels
from ..core.store import Result
from ..core.study import Sections
from ..core.table import markdown
from ..images.run import OPTIMIZERS
from ..methods import METHODS
from .images import grid_study, network

#: (method, optimizer) → σ → accuracy of every gauge after the last epoch.
Series = dict[tuple[str, str], dict[float, list[float]]]


def report(results: list[Result], name: str, folder: Path) -> Sections:
    """Heading, table, figure and caption."""
    found, settings = _series(results), results[0]["settings"]
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
            ends = [(min(values), _mean(values), max(values)) for values in by_sigma.values()]
            low, middle, high = zip(*ends, strict=True)
            style = {"sgd": "-", "momentum": ":", "adam": "--"}[optimizer]
            look = {"color": METHODS[method].color, "label": labels[method, optimizer]}
            axis.plot(list(by_sigma), middle, style, marker="o", markersize=4, **look)
            axis.fill_between(list(by_sigma), low, high, color=look["color"], alpha=0.2, linewidth=0)
        axis.set(xlabel="σ of the log-scales", ylabel="test accuracy, %", xticks=sigmas)
    caption = (
        f"Test accuracy after {settings['epochs']} epochs of one network in {len(settings['seeds'])} gauges: mean, and "
        "in brackets the lowest and the highest. All start as the same function and see the same batches. Rates were "
        "chosen by the sweep, for the network as PyTorch initialises it. "
        f"torch {results[0]['environment']['torch']}."
    )
    header = ["method, optimizer", "rate", *(f"σ = {sigma:g}" for sigma in sigmas)]
    return {name: f"**{heading}**\n\n{markdown(header, rows)}\n\n{caption}"}


def _series(results: list[Result]) -> Series:
    found: Series = {}
    runs = sorted((r["settings"] | {"found": r["test_accuracy"][-1]} for r in results), key=lambda run: run["rescaled"])
    for optimizer in OPTIMIZERS:
        for method in METHODS:
            mine = [run for run in runs if (run["method"], run["optimizer"]) == (method, optimizer)]
            if mine:
                found[method, optimizer] = {run["rescaled"]: run["found"] for run in mine}
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _cell(values: list[float] | None) -> str:
    return f"{_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""


_ALL = {"data": "cifar10", "activation": ["leaky-relu"], "epochs": 5, "rescaled": [0.0, 0.5, 1.0, 2.0]}
_GRIDS = [
    {**_ALL, "optimizer": optimizer, "method": method, "lr": lr}
    for optimizer, method, lr in (
        ("sgd", "none", 0.03),
        ("sgd", "uc-network", 0.01),
        ("sgd", "batchnorm", 0.01),
        ("adam", "none", 3e-4),
        ("adam", "uc-network", 1e-4),
        ("adam", "uc-layer", 0.01),
    )
]

STUDIES = {"uc-rescaled": grid_study("one network in several gauges", _GRIDS, report)}
