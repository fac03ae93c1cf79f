"""Which rates train plain SGD, with BatchIdeal as it is by default and without it, whatever the batch size."""

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
    found = {tuple(r["settings"][key] for key in ("lr", "method", "batch_size")): r for r in results}
    columns = sorted({key[1:] for key in found}, key=lambda column: (list(METHODS).index(column[0]), column[1]))
    rows = [
        [f"{rate:g}", *(plus_minus(found[(rate, *column)]["test_accuracy"][-1], 1) for column in columns)]
        for rate in sorted({key[0] for key in found})
    ]
    header = ["rate", *(f"{METHODS[method].label}, batch {size}" for method, size in columns)]
    settings = results[0]["settings"]
    caption = (
        f"{network(results[0]).rpartition(',')[0]}, {settings['activation']}, SGD without momentum, "
        f"{settings['epochs']} epochs: test accuracy in per cent, mean ± standard error over {len(settings['seeds'])} "
        f"seeds. {machine(results[0]['environment'], settings['device'])}"
    )
    return {name: f"{markdown(header, rows)}\n\n{caption}"}


_GRID = {
    "data": "digits", "method": METHODS_COMPARED, "activation": ["tanh"], "optimizer": "sgd", "lr": RATES,
    "batch_size": BATCH_SIZES, "epochs": 10, "seeds": 3,
}  # fmt: skip
STUDIES = {"rates": grid_study("rates that train SGD with and without BatchIdeal; minutes", [_GRID], report)}
