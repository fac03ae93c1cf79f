"""Which rates train plain SGD, with BatchIdeal as it is by default and without it, whatever the batch size."""

from collections import defaultdict
from pathlib import Path

from ..core.store import Result
from ..core.study import Sections
from ..core.table import machine, markdown, plus_minus
from ..methods import METHODS
from .comparison import grid_study, network

METHODS_COMPARED = ["none", "batch-ideal-default"]
RATES = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
BATCH_SIZES = [8, 32, 128]


def report(results: list[Result], name: str, folder: Path) -> Sections:
    """Test accuracy by rate, a column for each method and batch size."""
    columns: dict[tuple[str, int], dict[float, Result]] = defaultdict(dict)
    for result in sorted(results, key=_place):
        settings = result["settings"]
        columns[settings["method"], settings["batch_size"]][settings["lr"]] = result
    rates = sorted({rate for found in columns.values() for rate in found})
    rows = [[f"{rate:g}", *(_accuracy(found.get(rate)) for found in columns.values())] for rate in rates]
    header = ["rate", *(f"{METHODS[method].label}, batch {size}" for method, size in columns)]
    settings = results[0]["settings"]
    caption = (
        f"{network(results[0]).rpartition(',')[0]}, {settings['activation']}, SGD without momentum, "
        f"{settings['epochs']} epochs: test accuracy in per cent, mean ± standard error over {len(settings['seeds'])} "
        f"seeds. {machine(results[0]['environment'], settings['device'])}"
    )
    return {name: f"{markdown(header, rows)}\n\n{caption}"}


def _place(result: Result) -> tuple[int, int]:
    return list(METHODS).index(result["settings"]["method"]), result["settings"]["batch_size"]


def _accuracy(result: Result | None) -> str:
    return "" if result is None else plus_minus(result["test_accuracy"][-1], 1)


_GRID = {
    "data": "digits", "method": METHODS_COMPARED, "activation": ["tanh"], "optimizer": "sgd", "lr": RATES,
    "batch_size": BATCH_SIZES, "epochs": 10, "seeds": 3,
}  # fmt: skip
STUDIES = {"rates": grid_study("rates that train SGD with and without BatchIdeal; minutes", [_GRID], report)}
