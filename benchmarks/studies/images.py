"""What studies of networks for images share: a study made of grids, and the names of things in tables and figures."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..core.progress import run_all
from ..core.store import Result, Store
from ..core.study import Sections, Study
from ..core.table import plus_minus
from ..images.run import Grid, add_arguments, expand
from ..images.train import IMAGES
from ..methods import METHODS

#: What tables and figures call a data set. The JPEG copy's pixels differ slightly from the original release's.
DATA_LABELS = {"imagefolder:cifar10-jpeg": "CIFAR-10 (JPEG copy)", "cifar10": "CIFAR-10"}

#: What they call a kind of network, before its sizes.
NETWORK_LABELS = {
    None: "",
    "cnn-pool": "convolutions and global average pooling ",
    "cnn": "convolutions without pooling ",
}


def grid_study(help: str, grids: Sequence[Grid], report: Callable[[list[Result], str, Path], Sections]) -> Study:
    """A study of every combination of the settings of some grids, any of which a command may replace."""

    def run(options: argparse.Namespace, store: Store) -> None:
        given: dict[str, Any] = vars(options)
        run_all(expand(grids, given), IMAGES, store, download=options.download)

    return Study(help, run, lambda store, name, folder: report(store.read(), name, folder), add_arguments)


def network(result: Result) -> str:
    """Data, layer sizes and batch size of a run."""
    settings = result["settings"]
    data = DATA_LABELS.get(settings["data"], settings["data"])
    sizes = [result["features"], *settings["hidden"], result["classes"]]
    kind = NETWORK_LABELS[settings.get("network")]
    return f"{data}, {kind}{sizes}, batch {settings['batch_size']}"


def accuracy(result: Result) -> str:
    """Test accuracy after the last epoch: mean ± standard error over seeds."""
    return plus_minus(result["test_accuracy"][-1])


def line_style(name: str) -> str:
    """Gradient-only methods are dashed, coordinates dotted as well: colour alone does not carry to everyone."""
    method = METHODS[name]
    return "--" if method.correction else "-." if method.whitening is not None or method.gauge else "-"
