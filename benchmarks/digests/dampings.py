"""Which damping: by the trials of all studies, what each one loses against the best of its search."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core.store import Result, Store
from ..core.study import Digest
from ..core.tables import Row, Section, Table, exact, grouped
from ..core.tune import eighths
from ..methods import METHODS
from ..optimizers import OF_MODELS
from ..problems.pictures import psnr


class Source(NamedTuple):
    """A file of trials."""

    field: str
    unit: str
    loss: Callable[[float], float]  # of a score; in the unit
    where: Mapping[str, Any] = {}  # settings of the trials that belong to it


SOURCES: dict[str, list[Source]] = {
    "coordinates": [
        Source("coordinate network, ReLU", "dB", lambda error: -psnr(error), {"network": "relu"}),
        Source("coordinate network, Fourier features", "dB", lambda error: -psnr(error), {"network": "fourier"}),
    ],
    "equations": [Source("nonlinear equations", "log₁₀ of the error", math.log10)],
    "tabular": [Source("regression", "log₁₀ of the error", math.log10)],
    "mlp-tuned": [Source("tanh MLP on CIFAR-10", "points", lambda accuracy: -accuracy)],
    "cnn-pool-tuned": [Source("CNN on CIFAR-10", "points", lambda accuracy: -accuracy)],
    "char-lm": [Source("language model", "nats", float)],
}
#: Settings that do not make another search.
_SEARCHED = {"lr", "damping", "seed", "seeds", "crop"}
#: Columns, in eighths of powers of ten: a trial counts for the nearest.
_COLUMNS = [-28, -24, -20, -16, -12, -8, -4, 0, 4]


def _optimizer(settings: Mapping[str, Any]) -> str:
    name = str(METHODS[settings["method"]].optimizer or settings["optimizer"])
    return "AdamW" if name == "adamw" else OF_MODELS[name].label


def regrets(results: Iterable[Result], loss: Callable[[float], float]) -> dict[str, list[dict[int, float]]]:
    """Optimizer → for every search of a whitened one: damping, as a column, → what its best rate loses to the best."""
    searches = grouped(
        (r for r in results if r["settings"]["method"].startswith("whitened") and "damping" in r["settings"]),
        lambda r: (_optimizer(r["settings"]), *sorted(
            (name, str(value)) for name, value in r["settings"].items() if name not in _SEARCHED
        )),
    )  # fmt: skip
    found: dict[str, list[dict[int, float]]] = {}
    for search, trials in searches.items():
        optimizer = str(search[0])
        points = grouped(trials, lambda r: (r["settings"]["damping"], r["settings"]["lr"]))
        whole = max(map(len, points.values()))
        best: dict[int, float] = {}
        for (damping, _), own in points.items():
            if len(own) == whole and all(r["score"] is not None for r in own):
                column = min(_COLUMNS, key=lambda place: abs(place - eighths(damping)))
                mean = statistics.fmean(loss(r["score"]) for r in own)
                best[column] = min(mean, best.get(column, math.inf))
        if len(best) > 1:
            least = min(best.values())
            found.setdefault(optimizer, []).append({column: value - least for column, value in best.items()})
    return found


def _table(stores: Mapping[str, Store], name: str, folder: Path) -> Section:
    rows = list[Row]()
    for file, sources in SOURCES.items():
        for source in sources if file in stores else []:
            trials = stores[file].read("search")
            own = [r for r in trials if source.where.items() <= r["settings"].items()]
            for optimizer, searches in regrets(own, source.loss).items():
                values = [[each[column] for each in searches if column in each] for column in _COLUMNS]
                means = [statistics.fmean(v) if v else None for v in values]
                cells = [exact(mean, ".2f") for mean in means]
                rows.append([f"{source.field}, {optimizer}", source.unit, exact(len(searches)), *cells])
    header = ["", "unit", "searches", *(f"{10 ** (column / 8):.1g}" for column in _COLUMNS)]
    caption = (
        "What a damping loses, at its best learning rate, against the best of the same search: mean over searches "
        "(networks, normalisers, ranks). Empty was not tried."
    )
    return Section([Table(header, rows), caption])


DIGESTS = {"dampings": Digest(("coordinates", "char-lm"), _table, ("docs/chooser.md",))}
