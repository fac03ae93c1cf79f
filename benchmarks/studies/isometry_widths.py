"""Isometry by layer at initialisation, for several widths of the hidden layers (Joudaki et al. 2023, Fig. B.4)."""

import argparse
import math
from functools import partial
from pathlib import Path

from ..core.progress import measure
from ..core.run import public_name
from ..core.store import Result, Store, setting
from ..core.study import Recipe, Sections, Study, named
from ..core.table import Row, Section, Table, exact
from ..data import DATA
from .comparison import DATA_LABELS
from .isometry_training import train

WIDTHS = [[1000] * 5, [512, 1024, 2048, 4096, 8192], [8192, 4096, 2048, 1024, 512], [1024, 2048, 1024, 2048, 1024]]


def _run(options: argparse.Namespace, store: Store) -> None:
    def measured(widths: list[int]) -> Result:
        return {"widths": widths, **train("tanh", options.data, 0, widths, samples=256, download=options.download)}

    measure(store, {f"{widths}, {public_name(options.data)}": partial(measured, widths) for widths in WIDTHS})


def report(store: Store, name: str, folder: Path) -> Sections:
    """A table of every data set."""
    return {own: _table(results) for own, results in named(name, store.read(), setting("data")).items()}


def _table(results: list[Result]) -> Section:
    """Gap behind every norm, a row for each choice of widths."""
    rows = list[Row]()
    for result in results:
        norms = [layer["isometry"] for layer in result["isometry"]["start"] if layer["path"].startswith("norm")]
        rows.append([", ".join(map(str, result["widths"])), *(exact(-math.log(isometry), ".3f") for isometry in norms)])
    header = ["widths", *(f"norm {number}" for number in range(len(rows[0]) - 1))]
    data = results[0]["settings"]["data"]
    caption = (
        f"{DATA_LABELS.get(data, data)}, tanh, at initialisation: isometry gap of "
        f"{results[0]['samples']} samples behind every norm, one seed (Fig. B.4). "
        f"torch {results[0]['environment']['torch']}."
    )
    return Section([Table(header, rows), caption])


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default="cifar10", help=f"{', '.join(DATA)}; imagefolder as imagefolder:PATH")
    parser.add_argument("--download", action="store_true", help="let torchvision fetch CIFAR-10 into ./data")


STUDIES = {
    "isometry-widths": Study(
        "isometry by layer for several widths, Fig. B.4", _run, report, _arguments,
        makes=[Recipe(0.02)], data="images", page="docs/results/isometry.md",
    )
}  # fmt: skip
