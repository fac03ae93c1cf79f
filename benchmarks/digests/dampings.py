"""Which damping: by the trials of all studies, what each one loses against the best of its search."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from ..core.store import Result
from ..core.study import Digest
from ..core.tables import Row, Section, Table, exact, grouped
from ..core.tune import eighths
from ..methods import METHODS
from ..optimizers import OF_MODELS
from .reached import Settings, Stores, matching, measure_of

#: Field, the file of its trials, and settings of those that belong to it.
SOURCES: list[tuple[str, str, Settings]] = [
    ("coordinate network, ReLU", "coordinates-ordinary", {"network": "relu"}),
    ("coordinate network, Fourier features", "coordinates-ordinary", {"network": "fourier"}),
    ("nonlinear equations", "equations", {}),
    ("regression", "tabular", {}),
    ("tanh MLP on CIFAR-10", "mlp-tuned", {}),
    ("CNN on CIFAR-10", "cnn-pool-tuned", {}),
    ("language model", "char-lm", {}),
]
#: Settings that do not make another search.
_SEARCHED = {"lr", "damping", "seed", "seeds", "crop"}
#: Columns, in eighths of powers of ten: a trial counts for the nearest.
_COLUMNS = [-28, -24, -20, -16, -12, -8, -4, 0, 4, 8, 16]


def _trial(settings: Mapping[str, Any], loss: float) -> dict[str, Any]:
    name, damping = METHODS[settings["method"]].optimizer or settings["optimizer"], settings["damping"]
    return {
        "optimizer": "AdamW" if name == "adamw" else OF_MODELS[str(name)].label,
        "search": str(sorted((key, str(value)) for key, value in settings.items() if key not in _SEARCHED)),
        "point": (damping, settings["lr"]),
        "column": min(_COLUMNS, key=lambda place: abs(place - eighths(damping))),
        "loss": loss,
    }


def regrets(results: Iterable[Result], loss: Callable[[float], float]) -> pd.DataFrame:
    """A row for every search of a whitened optimizer: what the best rate of a damping loses to the best of all.

    Points whose runs are not all there, or broke down, do not count, nor do searches of one damping.
    """
    trials = pd.DataFrame(
        _trial(r["settings"], math.nan if r["score"] is None else loss(r["score"]))
        for r in results
        if r["settings"]["method"].startswith("whitened") and "damping" in r["settings"]
    )
    if trials.empty:
        return trials
    search = ["optimizer", "search"]
    points = trials.groupby([*search, "column", "point"], sort=False)["loss"].agg(["size", statistics.fmean])
    is_whole = points["size"] == points.groupby(search)["size"].transform("max")
    best = points[is_whole].groupby([*search, "column"], sort=False)["fmean"].min().unstack(sort=False)
    return best.sub(best.min(axis=1), axis=0)[best.count(axis=1) > 1]


def _table(stores: Stores, name: str, folder: Path) -> Section:
    rows = list[Row]()
    for field, file, where in (source for source in SOURCES if source[1] in stores):
        measure = measure_of(stores, file)
        unit = "log₁₀ of the error" if measure.unit == "×" else measure.unit
        losses = regrets(matching(stores[file].read("search"), where), measure.loss).reindex(columns=_COLUMNS)
        for optimizer, searches in grouped(losses.index, lambda search: search[0]).items():
            tried = [losses.loc[searches, column].dropna() for column in _COLUMNS]
            cells = [exact(statistics.fmean(each) if len(each) else None, ".2f") for each in tried]
            rows.append([f"{field}, {optimizer}", unit, exact(len(searches)), *cells])
    header = ["", "unit", "searches", *(f"{float(f'{10 ** (column / 8):.1g}'):g}" for column in _COLUMNS)]
    about = "What a damping loses, at its best learning rate, to the best of a search; mean over searches."
    return Section([Table(header, rows), about])


DIGESTS = {"dampings": Digest(("coordinates-ordinary", "char-lm"), _table, "docs/chooser.md")}
