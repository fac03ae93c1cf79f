"""Accuracy against the learning rate: every method over a range of rates, from result files alone."""

from collections import defaultdict
from pathlib import Path

from .methods import LABELS
from .pictures import COLORS, panels
from .runs import OPTIMIZERS
from .tables import Result, markdown, mean_and_error, network

#: Rates count as good if they come this near to the best one, in points.
NEAR = 2.0

Curves = dict[tuple[str, str], dict[float, tuple[float, float]]]


def applies(results: list[Result]) -> bool:
    """Whether these are runs of one method at more than two rates."""
    return any(len(curve) > 2 for curve in curves(results).values())


def curves(results: list[Result]) -> Curves:
    """(method, optimizer) → rate → accuracy after the last epoch: mean and error over seeds."""
    found: Curves = defaultdict(dict)
    for result in sorted(results, key=lambda r: r["settings"]["lr"]):
        settings = result["settings"]
        found[settings["method"], settings["optimizer"]][settings["lr"]] = mean_and_error(result["test_accuracy"][-1])
    return found


def best(curve: dict[float, tuple[float, float]]) -> float:
    """The rate of the highest accuracy; a run that diverged to NaN counts as guessing does."""
    return max(curve, key=lambda rate: curve[rate][0])


def section(results: list[Result], path: Path) -> str:
    """Draw the curves to `path`; return heading, table and caption as Markdown."""
    found, settings = curves(results), results[0]["settings"]
    optimizers = [name for name in OPTIMIZERS if any(key[1] == name for key in found)]
    where = "a tenth of the training set, held out" if settings.get("validation") else "the test set"
    heading = f"{network(results[0])}, {settings['activation']}, accuracy by learning rate"
    rows = []
    for optimizer in optimizers:
        for method, label in LABELS.items():
            curve = found.get((method, optimizer))
            if curve is None:
                continue
            top = best(curve)
            near = [rate for rate in curve if curve[rate][0] >= curve[top][0] - NEAR]
            edge = ", at the sweep's edge" if top in (min(curve), max(curve)) else ""
            rows.append(
                [
                    optimizer,
                    label,
                    f"{top:g}{edge}",
                    "{:.2f} ± {:.2f}".format(*curve[top]),
                    ", ".join(f"{rate:g}" for rate in near),
                ]
            )
    _figure(found, optimizers, f"{heading}, {settings['epochs']} epochs", path)
    header = ["optimizer", "method", "best rate", "accuracy there, %", f"rates within {NEAR:g} points of it"]
    counts = sorted({len(curve) for curve in found.values()})
    caption = (
        f"Accuracy on {where}, after {settings['epochs']} epochs at a constant rate, mean ± standard error over "
        f"{len(settings['seeds'])} seeds. Every method has {' or '.join(map(str, counts))} rates, a factor of about "
        f"three apart. torch {results[0]['environment']['torch']}."
    )
    return f"**{heading}**\n\n{markdown(header, rows)}\n\n{caption}"


def _figure(found: Curves, optimizers: list[str], title: str, path: Path) -> None:
    with panels(optimizers, title, path) as axes:
        for axis, optimizer in zip(axes, optimizers, strict=True):
            for method, label in LABELS.items():
                curve = found.get((method, optimizer))
                if curve is None:
                    continue
                means, errors = zip(*curve.values(), strict=True)
                axis.errorbar(list(curve), means, errors, color=COLORS[method], marker="o", markersize=4, label=label)
            axis.set(xlabel="learning rate", xscale="log")
        axes[0].set_ylabel("accuracy, %")
