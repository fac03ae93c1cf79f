"""Methods side by side at one rate: the table of accuracies and prices, and the figure of accuracy by epoch."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from ..core.figure import panels
from ..core.store import Result
from ..core.study import Sections
from ..core.table import in_order, machine, markdown, mean_and_error
from ..images.networks import ACTIVATIONS
from ..images.run import BACKENDS
from ..methods import DEFAULT, METHODS
from .images import accuracy, grid_study, line_style, network

#: Settings that distinguish rows and columns within one table; all others distinguish tables.
_WITHIN_TABLE = ("method", "activation", "backend", "seeds", "epochs")


def report(results: list[Result], name: str, folder: Path) -> Sections:
    """A table and a figure of every protocol: data, network, batch size, rate and device."""
    sections: Sections = {}
    groups = _grouped(results)
    for number, group in enumerate(groups, start=1):
        own = name if len(groups) == 1 else f"{name}-{number}"
        settings = group[0]["settings"]
        title = f"{network(group[0])}, {settings['optimizer']} {settings['lr']:g}, {settings['device']}"
        _figure(group, title, folder / f"{own}.png")
        sections[own] = f"**{title}**\n\n{_table(group)}\n\n{_caption(group)}"
    return sections


def _grouped(results: Iterable[Result]) -> list[list[Result]]:
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        key = {name: value for name, value in result["settings"].items() if name not in _WITHIN_TABLE}
        groups[str(sorted(key.items()))].append(result)
    return list(groups.values())


def _milliseconds(result: Result) -> float:
    """Time of one step of one seed, from the median epoch."""
    seconds = sorted(result["seconds"])
    return 1e3 * seconds[len(seconds) // 2] / result["steps_per_epoch"] / len(result["settings"]["seeds"])


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
            cells.append(f"{_milliseconds(runs[0]):.2f}" if runs else "")
        rows.append([METHODS[method].label, *cells])
    header = ["method", *(f"{activation}, %" for activation in activations)]
    return markdown([*header, *(f"{backend}, ms/step" for backend in backends)], rows)


def _caption(group: list[Result]) -> str:
    """Say under a table what its numbers are."""
    runs = "; ".join(
        f"{backend}: epochs {epochs}, seeds {seeds}"
        for backend, epochs, seeds in sorted(
            {(r["settings"]["backend"], r["settings"]["epochs"], len(r["settings"]["seeds"])) for r in group}
        )
    )
    return (
        f"Test accuracy after the last epoch, mean ± standard error over seeds ({runs}; accuracies are the first "
        f"one's). Time is per step and seed, training only, "
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
                for run in (
                    r for r in runs if (r["settings"]["method"], r["settings"]["activation"]) == (name, activation)
                ):
                    means, errors = zip(*(mean_and_error(epoch) for epoch in run["test_accuracy"]), strict=True)
                    epochs = range(1, len(means) + 1)
                    low, high = zip(*((m - e, m + e) for m, e in zip(means, errors, strict=True)), strict=True)
                    axis.plot(epochs, means, line_style(name), color=method.color, label=method.label, linewidth=1.6)
                    axis.fill_between(epochs, low, high, color=method.color, alpha=0.2, linewidth=0)
            axis.set_xlabel("epoch")
            axis.xaxis.get_major_locator().set_params(integer=True)
        axes[0].set_ylabel("test accuracy, %")


#: The papers' protocol: plain [0, 1] pixels, PyTorch's initialisation, Adam at 10⁻³ for everybody.
PAPERS = {"data": "cifar10", "method": DEFAULT, "activation": list(ACTIVATIONS)}
_DIGITS = {**PAPERS, "data": "digits"}
#: The Jacobian path is there for its price: one seed and one epoch show it.
_PRICED = {**_DIGITS, "activation": ["tanh"], "backend": "jacobian", "seeds": 1, "epochs": 1}
#: The paper's Appendix B.2, small enough for two CPU cores.
_CONVOLUTIONS = {
    "data": "cifar10",
    "method": [
        "none", "batchnorm", "layernorm", "rmsnorm", "affine-like", "l2norm", "l2norm-half", "l2-patch",
        "l2-patch-half", "proportional", "disproportional", "batch-ideal", "whitened-16",
    ],
    "activation": ["leaky-relu"], "batch_size": 128, "epochs": 10, "seeds": 3, "backend": "loop",
}  # fmt: skip

_CNN = {**_CONVOLUTIONS, "network": "cnn", "hidden": (16, 32, 32, 32, 32)}
_CNN_POOL = {**_CONVOLUTIONS, "network": "cnn-pool", "hidden": (16, 32, 32)}

STUDIES = {
    "digits": grid_study("all methods on the embedded digits; minutes", [_DIGITS, _PRICED], report),
    "cifar10": grid_study("the same on CIFAR-10", [PAPERS], report),
    "cnn-pool": grid_study("convolutions and global average pooling", [_CNN_POOL], report),
    "cnn": grid_study("convolutions without pooling", [_CNN], report),
    "compare": grid_study("any methods, data and settings; give it a --name", [_DIGITS], report),
}
