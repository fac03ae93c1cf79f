"""What a wrapper gains in every field over its own optimizer, at which price, and with which settings: `calls.csv`."""

import inspect
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from examples.gpt import NORM_LABELS

from ..core.arms import label, pace
from ..core.store import Result, setting
from ..core.study import Digest
from ..core.tables import Cell, Row, Section, Table, exact, grouped
from ..methods import METHODS
from ..optimizers import OF_MODELS
from ..studies.coordinates import prices
from .comparisons import beside, settings, table
from .reached import Sample, Settings, Stores, best_runs, measure_of, runs, timings, trials, values

#: What makes a run that others of its file are compared with.
_KEYS = ("norm", "method", "optimizer", "rows", "embedding_deviation", "embedding_lr")


class Call(NamedTuple):
    """A row: a task, what is written for it, and the runs that are compared."""

    task: str
    write: str
    call: str  # what is called, by the options that pages name it by
    file: str
    among: Settings  # of all runs that are compared, rivals too
    wrapped: Settings
    bare: Settings
    price: str  # what says the price of a step, a name in `PRICES`, and the words that it is told; or nothing does
    is_shown: bool  # on the page of what it gains
    is_typical: bool  # and on that of its settings

    def runs(self, stores: Stores, settings: Settings) -> list[Result]:
        """The best runs with some settings, among those that are compared."""
        return best_runs(stores, self.file, **{**self.among, **settings})

    def samples(self, stores: Stores) -> list[Sample]:
        """What was reached with the wrapper, and without it."""
        return [values(self.runs(stores, settings)) for settings in (self.wrapped, self.bare)]

    def price_of_step(self, stores: Stores) -> float | None:
        """The price of a step, in steps of the bare optimizer; None where nothing says it."""
        name, *words = self.price.split(": ")
        return PRICES[name](stores, self, *words) if name else None

    def lead(self, stores: Stores) -> Cell:
        """How far it is ahead of the best of the rivals, by a t test's interval."""
        measure, (wrapped, bare) = measure_of(stores, self.file), self.samples(stores)
        groups = grouped(runs(stores, self.file, **self.among), lambda r: tuple(map(r["settings"].get, _KEYS)))
        rivals = [dict(zip(_KEYS, key, strict=True)) for key in groups if not from_this_library(*key[1:3])]
        samples = {place: values(self.runs(stores, rival)) for place, rival in enumerate(rivals)}
        place = measure.best(samples)
        if samples[place] == bare:
            return Cell("the optimizer alone", {"": "the optimizer alone"})
        name, cell = _label(rivals[place]), measure.amount(measure.difference(wrapped, samples[place]))
        numbers = {f"difference {key}".strip(): value for key, value in cell.numbers.items()}
        return Cell(f"{name}: {cell.text}", {"": name, **numbers})


def _call(row: Mapping[str, str]) -> Call:
    (among,), (wrapped,) = settings(row["among"]), settings(row["runs"])
    (bare,) = beside(wrapped, row["others"])
    shown = [row[column] == "yes" for column in ("shown", "typical")]
    return Call(row["task"], row["write"], row["call"], row["file"], among, wrapped, bare, row["price"], *shown)


def from_this_library(method: str, optimizer: str | None = None) -> bool:
    """Whether a method's optimizer is wrapped by this library, or is of it."""
    entry = METHODS[method]
    by_inputs = getattr(entry.by_inputs, "func", entry.by_inputs)
    is_wrapper = by_inputs is not None and by_inputs.__module__.startswith("adiv_optim")
    return optimizer == "gauss-newton" or is_wrapper or entry.correction is not None or entry.gauge is not None


def _label(settings: Settings) -> str:
    """A rival: an arm, or its normaliser or method, and its optimizer."""
    method = METHODS[settings["method"]]
    if method.applies == "language":
        drawn = ", embeddings of 1" if settings["embedding_deviation"] == 1.0 else ""
        return f"{method.label}, {NORM_LABELS[settings['norm']]}{drawn}"
    if settings["norm"] is not None:
        return label(settings)
    name = "no normaliser" if settings["method"] == "none" else method.label
    return f"{name}, {OF_MODELS[settings['optimizer']].label}"


# Prices of a step.
def _timed(stores: Stores, call: Call, suite: str, name: str, over: str = "") -> float:
    """By a row of a suite of timings, over that of another row if there is one: ratios may be to a third."""
    times = {what: float(row["time_ratio"]["median"]) for what, row in timings(stores, suite).items()}
    return times[name] / times.get(over, 1.0)


def _fourier(stores: Stores, call: Call, optimizer: str) -> float:
    """By what the study measured before it trained."""
    times = prices(stores["fourier"])
    return float(times[f"whitened {optimizer}"]["median"] / times[optimizer]["median"])


def _paces(stores: Stores, call: Call) -> float | None:
    """By the processor time of runs of one network and number of points, if there are."""
    wrapped, bare = (
        {key: statistics.median(map(pace, alike)) for key, alike in grouped(each, setting("hidden", "inner")).items()}
        for each in (runs(stores, call.file, **{**call.among, **arm}) for arm in (call.wrapped, call.bare))
    )
    ratios = [wrapped[key] / bare[key] for key in wrapped if key in bare]
    return statistics.median(ratios) if ratios else None


def _convolutions(stores: Stores, call: Call) -> float:
    """The higher of the prices in the two networks of convolutions."""

    def seconds(file: str, method: str) -> float:
        return statistics.median(runs(stores, file, method=method)[0]["seconds"])

    return max(seconds(file, "whitened-16") / seconds(file, "none") for file in ("cnn", "cnn-pool"))


PRICES: dict[str, Callable[..., float | None]] = {
    "timed": _timed, "fourier": _fourier, "paces": _paces, "convolutions": _convolutions,
}  # fmt: skip
CALLS = [_call(row) for row in table("calls")]


def _option(method: str, name: str) -> Any:
    """What a method's wrapper or rule is built with: an option that it was given, or its default; 0 without it."""
    wrapper = METHODS[method].by_inputs or METHODS[method].correction
    known = inspect.signature(getattr(wrapper, "func", type(wrapper))).parameters
    default = known[name].default if name in known else 0
    return getattr(wrapper, "keywords", {}).get(name, default)


def _calls(stores: Stores, name: str, folder: Path) -> Section:
    rows = list[Row]()
    for call in CALLS:
        measure, both = measure_of(stores, call.file), (call.wrapped, call.bare)
        gain = measure.difference(*call.samples(stores))
        with_it, without = (trials(stores, call.file, {**call.among, **settings}) for settings in both)
        tried = Cell(f"{with_it}, {without}", {"with": with_it, "without": without})
        price = exact(call.price_of_step(stores), ".2f")
        rows.append([call.task, call.call, measure.amount(gain), gain.n, tried, price, call.lead(stores)])
    header = ["task, optimizer", "call", "gain over the optimizer (95 %)", "n", "trials"]
    header += ["price of a step", "lead on the best without this library"]
    caption = (
        "Less is better of nats, and of ×, the factor on an error. Steps or epochs are equal where no time is named. A "
        "price is in steps of the optimizer alone. For transformers without norms the best is of those without any; "
        "NorMuon with LayerNorm is ahead of it. From He's initialisation BatchNorm has not run; from PyTorch's, with "
        "SOAP, it is ahead of whitened Adam, and level with whitened SOAP."
    )
    return Section([Table(header, rows, [call.is_shown for call in CALLS]), caption])


def _settings(stores: Stores, name: str, folder: Path) -> Section:
    rows = list[Row]()
    for call in CALLS:
        wrapped, bare = (call.runs(stores, each)[0]["settings"] for each in (call.wrapped, call.bare))
        damping, rank, every = (_option(wrapped["method"], option) for option in ("damping", "rank", "every"))
        cells = [exact(bare["lr"]), exact(wrapped["lr"]), exact(wrapped.get("damping", damping) or None)]
        rows.append(
            [call.task, call.write, *cells, exact(rank or None) if rank is not None else "all", exact(every or None)]
        )
    header = ["you have", "write", "learning rate, alone", "wrapped", "`damping`", "`rank`", "`every`"]
    return Section(
        [Table(header, rows, [call.is_typical for call in CALLS]), "Chosen by trials on data that no table shows."]
    )


_OF = (
    "coordinates", "fourier", "initialisation", "equations", "cnn", "cnn-pool", "cnn-pool-tuned", "norm-free",
    "mlp-tuned", "speed",
)  # fmt: skip
DIGESTS = {
    "calls": Digest(_OF, _calls, ("docs/results/index.md",)),
    "settings": Digest(_OF, _settings, ("docs/chooser.md",)),
}
