"""Methods side by side at one rate: the table of accuracies and prices, and the figure of accuracy by epoch."""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..core.figure import band, panels
from ..core.progress import run_all
from ..core.store import Result, Store
from ..core.study import Sections, Study
from ..core.table import in_order, machine, markdown, plus_minus
from ..images.networks import ACTIVATIONS
from ..images.run import BACKENDS, Grid, add_arguments, expand
from ..images.train import IMAGES
from ..methods import DEFAULT, METHODS

#: What tables and figures call a data set. The JPEG copy's pixels differ slightly from the original release's.
DATA_LABELS = {"imagefolder:cifar10-jpeg": "CIFAR-10 (JPEG copy)", "cifar10": "CIFAR-10"}

#: What they call a kind of network, before its sizes.
NETWORK_LABELS = {
    "cnn-pool": "convolutions and global average pooling ",
    "cnn": "convolutions without pooling ",
    "residual": "skips around the hidden layers of ",
}


#: Name → grids: the settings of a protocol at one of its lengths.
Presets = Mapping[str, Sequence[Grid]]
#: (results, name of their file, folder for figures) → sections.
Report = Callable[[list[Result], str, Path], Sections]


def presets(*grids: Grid, reduced: Grid | None = None) -> Presets:
    """A paper's protocol at its own length, at the length that is `reduced`, and on digits to see that it runs."""
    shorter = {"epochs": 30, "seeds": 3} if reduced is None else reduced
    return {
        "paper": [{"epochs": 100, "seeds": 5, **grid} for grid in grids],
        "reduced": [{**grid, **shorter} for grid in grids],
        "smoke": [{**grid, "data": "digits", "epochs": 1, "seeds": 2} for grid in grids],
    }


def grid_study(help: str, grids: Sequence[Grid] | Presets, report: Report) -> Study:
    """A study of every combination of the settings of some grids, any of which a command may replace."""
    lengths = grids if isinstance(grids, Mapping) else {"": grids}

    def run(options: argparse.Namespace, store: Store) -> None:
        runs = expand(lengths[getattr(options, "preset", "")], vars(options))
        run_all(runs, IMAGES, store, download=options.download, only_estimate=options.estimate)

    def arguments(parser: argparse.ArgumentParser) -> None:
        add_arguments(parser, grids=next(iter(lengths.values())))
        parser.add_argument("--estimate", action="store_true", help="only say how long what is not there takes")
        if len(lengths) > 1:
            parser.add_argument("--preset", choices=lengths, default="paper", help="how long; paper: as in the paper")

    return Study(help, run, lambda store, name, folder: report(store.read(), name, folder), arguments)


def network(result: Result) -> str:
    """Data, layer sizes and batch size of a run."""
    settings = result["settings"]
    data = DATA_LABELS.get(settings["data"], settings["data"])
    sizes = [result["features"], *settings["hidden"], result["classes"]]
    kind = NETWORK_LABELS.get(settings.get("network"), "")
    return f"{data}, {kind}{sizes}, batch {settings['batch_size']}"


def accuracy(result: Result) -> str:
    """After the last epoch: mean ± standard error over seeds."""
    return plus_minus(result["test_accuracy"][-1])


#: Settings that distinguish rows and columns within one table; all others distinguish tables.
_WITHIN_TABLE = ("method", "activation", "backend", "seeds", "epochs")


def report(results: list[Result], name: str, folder: Path) -> Sections:
    """A table and a figure of every protocol: data, network, batch size, rate and device."""
    sections, groups = Sections(), defaultdict[str, list[Result]](list)
    for result in results:
        key = {name: value for name, value in result["settings"].items() if name not in _WITHIN_TABLE}
        groups[str(sorted(key.items()))].append(result)
    for number, group in enumerate(groups.values(), start=1):
        own = name if len(groups) == 1 else f"{name}-{number}"
        settings = group[0]["settings"]
        title = f"{network(group[0])}, {settings['optimizer']} {settings['lr']:g}, {settings['device']}"
        _figure(group, title, folder / f"{own}.png")
        sections[own] = f"**{title}**\n\n{_table(group)}\n\n{_caption(group)}"
    return sections


def _table(group: list[Result]) -> str:
    """Test accuracy after the last epoch (mean ± standard error), and the cost of each path."""
    found = {
        (r["settings"]["method"], r["settings"]["activation"], r["settings"]["backend"]): r
        for r in sorted(group, key=lambda r: r["settings"]["epochs"])
    }
    methods = in_order(METHODS, (key[0] for key in found))
    activations = in_order(ACTIVATIONS, (key[1] for key in found))
    backends = in_order(BACKENDS, (key[2] for key in found))
    rows = []
    for method in methods:
        cells = []
        for activation in activations:
            runs = [found[key] for backend in backends if (key := (method, activation, backend)) in found]
            cells.append(accuracy(runs[0]) if runs else "")
        for backend in backends:
            runs = [found[key] for activation in activations if (key := (method, activation, backend)) in found]
            # Of one step of one seed, from the median epoch.
            steps = [r["steps_per_epoch"] * len(r["settings"]["seeds"]) for r in runs]
            cells.append(f"{1e3 * statistics.median_high(runs[0]['seconds']) / steps[0]:.2f}" if runs else "")
        rows.append([METHODS[method].label, *cells])
    header = ["method", *(f"{activation}, %" for activation in activations)]
    return markdown([*header, *(f"{backend}, ms/step" for backend in backends)], rows)


def _caption(group: list[Result]) -> str:
    """Say under a table what its numbers are."""
    found = {(r["settings"]["backend"], r["settings"]["epochs"], len(r["settings"]["seeds"])) for r in group}
    runs = "; ".join("{}: epochs {}, seeds {}".format(*each) for each in sorted(found))
    return (
        f"Test accuracy after the last epoch, mean ± standard error over seeds ({runs}; accuracies are the first "
        "one's). Time is per step and seed, training only, "
        f"{machine(group[0]['environment'], group[0]['settings']['device'])}"
    )


def _figure(group: list[Result], title: str, path: Path) -> None:
    """Draw test accuracy against epoch, one panel per activation, a band of one standard error."""
    backend = "ensemble" if any(r["settings"]["backend"] == "ensemble" for r in group) else None
    runs = [r for r in group if backend in (None, r["settings"]["backend"])]
    activations = in_order(ACTIVATIONS, (r["settings"]["activation"] for r in runs))
    with panels(activations, title, path) as axes:
        for axis, activation in zip(axes, activations, strict=True):
            for name, method in METHODS.items():
                for run in runs:
                    if (run["settings"]["method"], run["settings"]["activation"]) != (name, activation):
                        continue
                    epochs = range(1, len(run["test_accuracy"]) + 1)
                    # Gradient-only is dashed, coordinates dotted as well: colour alone does not carry to everyone.
                    style = "--" if method.correction else "-." if method.by_inputs is not None or method.gauge else "-"
                    look = {"color": method.color, "label": method.label, "linewidth": 1.6}
                    band(axis, epochs, run["test_accuracy"], style, **look)
            axis.set_xlabel("epoch")
            axis.xaxis.get_major_locator().set_params(integer=True)
        axes[0].set_ylabel("test accuracy, %")


#: The papers' protocol: plain [0, 1] pixels, PyTorch's initialisation, Adam at 10⁻³ for everybody.
PAPERS = {"data": "cifar10", "method": DEFAULT, "activation": ["tanh", "leaky-relu"]}
_DIGITS = {**PAPERS, "data": "digits"}
#: The Jacobian path is there for its price: one seed and one epoch show it.
_PRICED = {**_DIGITS, "activation": ["tanh"], "backend": "jacobian", "seeds": 1, "epochs": 1}
#: The paper's Appendix B.2 (Figs. 8 and 9), which says neither sizes nor activation: small enough for two CPU cores.
_CONVOLUTIONS: Grid = {
    "data": "cifar10", "activation": ["leaky-relu"], "backend": "loop",
    "method": [*DEFAULT, "l2-patch", "l2-patch-half", "whitened-16"],
}  # fmt: skip
_CNN = {**_CONVOLUTIONS, "network": "cnn", "hidden": (16, 32, 32, 32, 32)}
_CNN_POOL = {**_CONVOLUTIONS, "network": "cnn-pool", "hidden": (16, 32, 32)}
_SHORT = {"epochs": 15, "seeds": 3}

STUDIES = {
    "digits": grid_study("all methods on the embedded digits; minutes", [_DIGITS, _PRICED], report),
    "cifar10": grid_study("the same on CIFAR-10", [PAPERS], report),
    "cnn-pool": grid_study(
        "convolutions and global average pooling, Fig. 8", presets(_CNN_POOL, reduced=_SHORT), report
    ),
    "cnn": grid_study("convolutions without pooling, Fig. 9", presets(_CNN, reduced=_SHORT), report),
    "compare": grid_study("any methods, data and settings; give it a --name", [_DIGITS], report),
}
