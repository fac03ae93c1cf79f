"""What tables and figures of networks for images have in common: how they call what was trained, and on what."""

from collections.abc import Sequence

from ..core.store import Result
from ..core.table import Cell, estimate

#: What tables and figures call a data set. The JPEG copy's pixels differ slightly from the original release's.
DATA_LABELS = {"imagefolder:cifar10-jpeg": "CIFAR-10 (JPEG copy)", "cifar10": "CIFAR-10"}

#: What they call a kind of network, before its sizes.
NETWORK_LABELS = {
    "cnn-pool": "convolutions and global average pooling ",
    "cnn": "convolutions without pooling ",
    "residual": "skips around the hidden layers of ",
}


def data_label(name: str) -> str:
    """What tables and figures call a data set: its name, if it has no other."""
    return DATA_LABELS.get(name, name)


def subject(results: Sequence[Result]) -> str:
    """Data and layer sizes of some runs, or how many networks they are of."""
    settings = results[0]["settings"]
    sizes = {str([r["features"], *r["settings"]["hidden"], r["classes"]]) for r in results}
    kind = NETWORK_LABELS.get(settings.get("network"), "")
    return f"{data_label(settings['data'])}, {kind}{sizes.pop() if len(sizes) == 1 else f'{len(sizes)} networks'}"


def network(result: Result) -> str:
    """Data, layer sizes and batch size of a run."""
    return f"{subject([result])}, batch {result['settings']['batch_size']}"


def accuracy(result: Result) -> Cell:
    """After the last epoch: mean ± standard error over seeds."""
    return estimate(result["test_accuracy"][-1])
