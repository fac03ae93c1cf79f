"""What a wrapper gains in every field over its own optimizer, at which price, and with which settings: `calls.csv`."""

import inspect
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from examples.gpt import NORM_LABELS

from ..core.arms import label, pace
from ..core.store import setting
from ..core.study import Digest
from ..core.tables import Cell, Row, Section, Table, exact, grouped
from ..methods import METHODS
from ..optimizers import OF_MODELS
from ..studies.coordinates import prices
from . import reached
from .reached import Settings, Stores, settings

#: What makes a run that others of its file are compared with.
_KEYS = ("norm", "method", "optimizer", "rows", "embedding_deviation", "embedding_lr")


class Call(NamedTuple):
    """A task, what is written for it, and the runs that are compared, as its row has it."""

    task: str
    write: str
    call: str  # what is called, by the options that pages name it by
    file: str
    among: str  # settings of all runs that are compared, rivals too
    runs: str  # with the wrapper
    others: str  # without it
    price: str  # what says the price of a step, a name in `PRICES`, and the words that it is told; or nothing does
    shown: str  # yes: on the page of what it gains
    typical: str  # yes: and on that of its settings

    @property
    def both(self) -> list[Settings]:
        """The settings of the runs with the wrapper, and of those without it."""
        ((among,), (wrapped,)) = map(settings, (self.among, self.runs))
        return [{**among, **each} for each in (wrapped, *reached.beside(wrapped, self.others))]

    def lead(self, stores: Stores) -> Cell:
        """How far it is ahead of the best of the rivals, by a t test's interval."""
        (among,), measure = settings(self.among), reached.measure_of(stores, self.file)
        wrapped, bare = (reached.reached(stores, self.file, **each) for each in self.both)
        groups = grouped(reached.runs(stores, self.file, **among), setting(*_KEYS))
        rivals = [dict(zip(_KEYS, key, strict=True)) for key in groups if not _is_from_this_library(*key[1:3])]
        samples = [reached.reached(stores, self.file, **{**among, **rival}) for rival in rivals]
        place = measure.best(dict(enumerate(samples)))
        if samples[place] == bare:
            return Cell("the optimizer alone", {"": "the optimizer alone"})
        name, cell = _label(rivals[place]), measure.amount(measure.difference(wrapped, samples[place]))
        numbers = {f"difference {key}".strip(): value for key, value in cell.numbers.items()}
        return Cell(f"{name}: {cell.text}", {"": name, **numbers})


def _is_from_this_library(method: str, optimizer: str | None) -> bool:
    """Whether a method's optimizer is wrapped by this library, or is of it."""
    entry = METHODS[method]
    by_inputs = getattr(entry.by_inputs, "func", entry.by_inputs)
    is_wrapper = by_inputs is not None and by_inputs.__module__.startswith("adiv_optim")
    return optimizer == "gauss-newton" or is_wrapper or entry.correction is not None or entry.gauge is not None


def _label(settings: Settings) -> str:
    """A rival: an arm, or its normaliser or method, and its optimizer."""
    method = METHODS[settings["method"]]
    if method.applies == "language":
        drawn = ", embeddings of deviation 1" if settings["embedding_deviation"] == 1.0 else ""
        return f"{method.label}, {NORM_LABELS[settings['norm']]}{drawn}"
    if settings["norm"] is not None:
        return label(settings)
    name = "no normaliser" if settings["method"] == "none" else method.label
    return f"{name}, {OF_MODELS[settings['optimizer']].label}"


# Prices of a step.
def _timed(stores: Stores, call: Call, suite: str, name: str, over: str = "") -> float:
    """By a suite of timings, or what `fourier` measured before it trained; ratios may be to a third."""
    times = prices(stores[suite]) if suite == "fourier" else reached.timings(stores, suite)
    return float(times[name]["median"] / times.get(over, {"median": 1.0})["median"])


def _paces(stores: Stores, call: Call) -> float | None:
    """By the processor time of runs of one network and number of points, if there are."""
    wrapped, bare = (
        {key: statistics.median(map(pace, alike)) for key, alike in grouped(each, setting("hidden", "inner")).items()}
        for each in (reached.runs(stores, call.file, **arm) for arm in call.both)
    )
    ratios = [wrapped[key] / bare[key] for key in wrapped if key in bare]
    return statistics.median(ratios) if ratios else None


def _convolutions(stores: Stores, call: Call) -> float:
    """The higher of the prices in the two networks of convolutions."""

    def seconds(file: str, method: str) -> float:
        return statistics.median(reached.runs(stores, file, method=method)[0]["seconds"])

    return max(seconds(file, "whitened-16") / seconds(file, "none") for file in ("cnn", "cnn-pool"))


PRICES: dict[str, Callable[..., float | None]] = {"timed": _timed, "paces": _paces, "convolutions": _convolutions}
CALLS = [Call(**row) for row in reached.table("calls")]


def _option(method: str, name: str) -> Any:
    """What a method's wrapper or rule is built with: an option that it was given, or its default; 0 without it."""
    wrapper = METHODS[method].by_inputs or METHODS[method].correction
    known = inspect.signature(getattr(wrapper, "func", type(wrapper))).parameters
    default = known[name].default if name in known else 0
    return getattr(wrapper, "keywords", {}).get(name, default)


def _calls(stores: Stores, name: str, folder: Path) -> Section:
    rows = list[Row]()
    for call in CALLS:
        measure = reached.measure_of(stores, call.file)
        gain = measure.difference(*(reached.reached(stores, call.file, **each) for each in call.both))
        with_it, without = (reached.trials(stores, call.file, each) for each in call.both)
        tried = Cell(f"{with_it}, {without}", {"with": with_it, "without": without})
        name, *words = call.price.split(": ")
        price = exact(PRICES[name](stores, call, *words) if name else None, ".2f")
        rows.append([call.task, call.call, measure.amount(gain), gain.n, tried, price, call.lead(stores)])
    header = ["task, optimizer", "call", "gain over the optimizer (95 %)", "n", "trials"]
    header += ["price of a step", "against the best without a wrapper"]
    caption = (
        "Intervals are uncorrected. Less is better of nats and ×, the factor on an error; `GaussNewton` is left out. "
        "Steps or epochs are equal where no time is named. A price is in steps of the optimizer alone, the CNN's by "
        "whole runs. Transformers "
        "without norms are compared with others without; NorMuon with LayerNorm is ahead of those. From He's "
        "initialisation BatchNorm has not run; from PyTorch's, with SOAP, it is ahead of whitened Adam and level with "
        "whitened SOAP."
    )
    return Section([Table(header, rows, [call.shown == "yes" for call in CALLS]), caption])


def _settings(stores: Stores, name: str, folder: Path) -> Section:
    rows = list[Row]()
    for call in CALLS:
        wrapped, bare = (reached.best_runs(stores, call.file, **each)[0]["settings"] for each in call.both)
        damping, rank, every = (_option(wrapped["method"], option) for option in ("damping", "rank", "every"))
        chosen = (bare["lr"], wrapped["lr"], wrapped.get("damping", damping) or None)
        kept = "None" if rank is None else exact(rank or None)
        rows.append([call.task, call.write, *map(exact, chosen), kept, exact(every or None)])
    header = ["you have", "write", "learning rate, alone", "wrapped", "`damping`", "`rank`", "`every`"]
    table = Table(header, rows, [call.typical == "yes" for call in CALLS])
    return Section([table, "Chosen by trials on data that no table shows; transformers' damping is the default."])


_OF = (
    "coordinates", "fourier", "initialisation", "equations", "cnn", "cnn-pool", "cnn-pool-tuned", "norm-free",
    "mlp-tuned", "speed",
)  # fmt: skip
DIGESTS = {
    "calls": Digest(_OF, _calls, "docs/results/index.md"),
    "settings": Digest(_OF, _settings, "docs/chooser.md"),
}
