"""Accuracy of one network in several gauges: what rescaling hidden units does to training, from result files alone."""

from pathlib import Path

from .methods import LABELS
from .pictures import COLORS, panels
from .runs import OPTIMIZERS
from .tables import Result, markdown, network

#: (method, optimizer) → σ → accuracy of every gauge after the last epoch.
Series = dict[tuple[str, str], dict[float, list[float]]]


def applies(results: list[Result]) -> bool:
    """Whether these are runs of rescaled networks."""
    return bool(results) and all("rescaled" in result["settings"] for result in results)


def series(results: list[Result]) -> Series:
    """Collect the accuracies, in the order in which tables and figures show them."""
    found: Series = {}
    runs = [r["settings"] | {"found": r["test_accuracy"][-1]} for r in results]
    for optimizer in OPTIMIZERS:
        for method in LABELS:
            mine = [run for run in runs if (run["method"], run["optimizer"]) == (method, optimizer)]
            if mine:
                found[method, optimizer] = {
                    run["rescaled"]: run["found"] for run in sorted(mine, key=lambda run: run["rescaled"])
                }
    return found


def section(results: list[Result], path: Path) -> str:
    """Draw accuracy against σ to `path`; return heading, table and caption as Markdown."""
    found, settings = series(results), results[0]["settings"]
    sigmas = sorted({sigma for by_sigma in found.values() for sigma in by_sigma})
    rates = {(r["settings"]["method"], r["settings"]["optimizer"]): r["settings"]["lr"] for r in results}
    heading = f"{network(results[0])}, {settings['activation']}, hidden units rescaled at random"
    rows = [
        [f"{LABELS[key[0]]}, {key[1]}", f"{rates[key]:g}", *(_cell(by_sigma.get(sigma)) for sigma in sigmas)]
        for key, by_sigma in found.items()
    ]
    with panels([f"{settings['epochs']} epochs"], heading, path) as (axis,):
        for (method, optimizer), by_sigma in found.items():
            ends = [(min(values), _mean(values), max(values)) for values in by_sigma.values()]
            low, middle, high = zip(*ends, strict=True)
            style = {"sgd": "-", "momentum": ":", "adam": "--"}[optimizer]
            label = f"{LABELS[method]}, {optimizer}"
            axis.plot(list(by_sigma), middle, style, color=COLORS[method], marker="o", markersize=4, label=label)
            axis.fill_between(list(by_sigma), low, high, color=COLORS[method], alpha=0.2, linewidth=0)
        axis.set(xlabel="σ of the log-scales", ylabel="test accuracy, %", xticks=sigmas)
    caption = (
        f"Test accuracy after {settings['epochs']} epochs of one network in {len(settings['seeds'])} gauges: mean, and "
        "in brackets the lowest and the highest. All start as the same function and see the same batches. Rates were "
        "chosen by the sweep, for the network as PyTorch initialises it. "
        f"torch {results[0]['environment']['torch']}."
    )
    header = ["method, optimizer", "rate", *(f"σ = {sigma:g}" for sigma in sigmas)]
    return f"**{heading}**\n\n{markdown(header, rows)}\n\n{caption}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _cell(values: list[float] | None) -> str:
    return f"{_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""
