"""What every table of results is made of."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

Result = dict[str, Any]

#: What tables and figures call a data set. The JPEG copy's pixels differ slightly from the original release's.
DATA_LABELS = {"imagefolder:cifar10-jpeg": "CIFAR-10 (JPEG copy)", "cifar10": "CIFAR-10"}

#: What they call a kind of network, before its sizes.
NETWORK_LABELS = {
    None: "",
    "cnn-pool": "convolutions and global average pooling ",
    "cnn": "convolutions without pooling ",
}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard error of the mean (NaN for a single value)."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def title(group: list[Result]) -> str:
    """One line that names the protocol of a table."""
    settings = group[0]["settings"]
    return f"{network(group[0])}, {settings['optimizer']} {settings['lr']:g}, {settings['device']}"


def network(result: Result) -> str:
    """Data, layer sizes and batch size of a run."""
    settings = result["settings"]
    data = DATA_LABELS.get(settings["data"], settings["data"])
    sizes = [result["features"], *settings["hidden"], result["classes"]]
    kind = NETWORK_LABELS[settings.get("network")]
    return f"{data}, {kind}{sizes}, batch {settings['batch_size']}"


def accuracy(result: Result) -> str:
    """Test accuracy after the last epoch: mean ± standard error over seeds."""
    mean, error = mean_and_error(result["test_accuracy"][-1])
    return f"{mean:.2f} ± {error:.2f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)
