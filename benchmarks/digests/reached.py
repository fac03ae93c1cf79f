"""What runs reached, whatever they learned, and how far some are ahead of others.

Tables of digests say which: `claims.csv` has what is claimed, `values.csv` numbers of sentences, `calls.csv` calls.
Settings of runs stand there as `method=affine-like; activation=tanh`, and of others those in which these differ.
"""

import csv
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ..core.arms import chosen, errors
from ..core.store import Result, Store, setting
from ..core.study import protocol
from ..core.tables import Cell, Difference, grouped, paired, welch
from ..problems.language import final_validation_loss, worth
from ..problems.pictures import psnr

Stores = Mapping[str, Store]
#: Settings of runs; a set stands for any of its members, and None for a run without the setting.
Settings = Mapping[str, Any]
#: What runs reached, by problem or seed.
Sample = Mapping[Any, float]


def table(name: str) -> list[dict[str, str]]:
    """The rows of a table, by their columns."""
    with (Path(__file__).parent / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def settings(cell: str) -> list[Settings]:
    """All combinations of settings that a cell names.

    A value is a word or JSON's; null stands for a run without the setting, and `a|b` for runs with any of several.

    Example:
        >>> settings("method=dyt,none; lr=0.1; rows=null")
        [{'method': 'dyt', 'lr': 0.1, 'rows': None}, {'method': 'none', 'lr': 0.1, 'rows': None}]
        >>> [sorted(each["data_set"]) for each in settings("data_set=a|b")]
        [['a', 'b']]
        >>> settings("hidden=[16,16]")
        [{'hidden': [16, 16]}]
    """
    pairs = [setting.split("=") for setting in cell.split("; ") if setting]
    values = product(*([_value(text) for text in re.split(r",(?![^[]*])", texts)] for _, texts in pairs))
    return [dict(zip([name for name, _ in pairs], each, strict=True)) for each in values]


def beside(runs: Settings, cell: str) -> list[Settings]:
    """The settings of the runs that some are compared with, which differ as a cell says; there are none if it is empty.

    Example:
        >>> beside({"method": "dyt", "lr": 0.1}, "method=none,layernorm")
        [{'method': 'none', 'lr': 0.1}, {'method': 'layernorm', 'lr': 0.1}]
    """
    return [{**runs, **different} for different in settings(cell)] if cell else []


def _value(text: str) -> Any:
    if "|" in text:
        return set(text.split("|"))
    try:
        return json.loads(text)
    except ValueError:
        return text


class Measure(NamedTuple):
    """The number that the runs of a file are compared by."""

    unit: str
    is_lower_better: bool
    has_pairs: bool = False  # arms have learned the same problems
    shown: Callable[[float], float] = float  # of what a run has

    def best(self, samples: Mapping[Any, Sample]) -> Any:
        """The key of the best of several samples, by the mean of what is shown."""
        return min(samples, key=lambda key: statistics.fmean(map(self.loss, samples[key].values())))

    def loss(self, value: float) -> float:
        """What is shown, or its negative where less is not better."""
        return self.shown(value) if self.is_lower_better else -self.shown(value)

    def mean(self, sample: Sample) -> float:
        """The mean of what is shown."""
        return statistics.fmean(map(self.shown, sample.values()))

    def difference(self, sample: Sample, other: Sample) -> Difference:
        """The one minus the other: in pairs, or by Welch's test."""
        return paired(sample, other, self.shown) if self.has_pairs else welch([*sample.values()], [*other.values()])

    def amount(self, difference: Difference) -> Cell:
        """A difference with its interval; of logarithms a factor."""
        numbers = {"": difference.mean, "low": difference.low, "high": difference.high}
        if self.unit == "×":
            numbers = {name: 10**each for name, each in numbers.items()}
            # Two digits would let an interval beside 1 touch it.
            digits = [".3g" if 0.5 < each < 2 else ".2g" if each < 100 else ",.0f" for each in numbers.values()]
        else:
            digits = [{"dB": "+.1f", "nats": "+z.3f", "points": "+z.1f"}[self.unit]] * 3
        mean, low, high = (format(each, spec) for each, spec in zip(numbers.values(), digits, strict=True))
        return Cell(f"{f'×{mean}' if self.unit == '×' else f'{mean} {self.unit}'} [{low}, {high}]", numbers)


ACCURACY, LOSS = Measure("points", False), Measure("nats", True)
DECIBELS, FACTOR = Measure("dB", False, True, psnr), Measure("×", True, True, math.log10)


def measure_of(stores: Stores, file: str) -> Measure:
    """The measure of a file's runs."""
    first = stores[file].read()[0]
    if "error" not in first:
        return ACCURACY if "test_accuracy" in first else LOSS
    return DECIBELS if "crop" in first["settings"] else FACTOR


def matching(results: Iterable[Result], wanted: Settings) -> list[Result]:
    """The results that have the wanted settings."""
    any_of = {name: value if isinstance(value, set) else (value,) for name, value in wanted.items()}
    return [r for r in results if all(r["settings"].get(name) in values for name, values in any_of.items())]


def runs(stores: Stores, file: str, **wanted: Any) -> list[Result]:
    """The results of a file that have the wanted settings; no results are a LookupError."""
    if results := matching(stores[file].read(), wanted):
        return results
    raise LookupError(f"{file} has no run with {wanted}.")


def best_runs(stores: Stores, file: str, **wanted: Any) -> list[Result]:
    """The runs with some settings that were chosen by what no table shows.

    Of arms those whose settings trials chose, for each data set. Of images one that was tested, of searches alone the
    best on held-out data. Of a language model, of the longest runs, those at the lowest validation loss. Two networks
    of an arm are an exception: the better one is chosen by the runs themselves, for trials are too short to tell.

    Raises:
        ValueError: several runs that were tested have them, and to take the best would be to choose by test accuracy.
    """
    results = runs(stores, file, **wanted)
    if "error" in results[0]:
        best = list[Result]()
        for same in grouped(results, setting("data_set")).values():
            networks = grouped(chosen(same), setting("hidden")).values()  # most arms have one
            best += min(networks, key=lambda each: statistics.median(errors(each).values()))
        return best
    if "test_accuracy" in results[0]:
        last = [r for r in results if not r["settings"].get("validation")]
        if len(last) > 1:
            raise ValueError(f"{len(last)} runs in {file!r} have {wanted}; say what tells them apart.")
        return [max(last or results, key=lambda r: statistics.fmean(r["test_accuracy"][-1]))]
    longest = max(r["settings"]["steps"] for r in results)
    groups = grouped((r for r in results if r["settings"]["steps"] == longest), protocol("seed")).values()
    return min(groups, key=lambda group: statistics.fmean(worth(final_validation_loss(r)) for r in group))


#: Settings in which trials may differ from the runs that they choose settings of.
_LENGTHS = {"steps", "seconds", "epochs", "held_out"}


def trials(stores: Stores, file: str, settings: Settings) -> int:
    """How many settings were tried for some runs: of several data sets or networks, the most for one."""
    wanted = {name: value for name, value in settings.items() if name not in _LENGTHS}
    validated = [r for r in stores[file].read() if r["settings"].get("validation")]
    tried = matching([*stores[file].read("search"), *stores[file].read("trials"), *validated], wanted)
    alike = grouped(tried, lambda r: str(setting("data_set", "hidden")(r))).values()
    tuned = setting("lr", "damping", "weight_decay", "inner")
    return max((len(set(map(tuned, same))) for same in alike), default=0)


def values(results: list[Result]) -> Sample:
    """What runs reached: an error, an accuracy or a test loss."""
    if "error" in results[0]:
        return errors(results)
    if "test_accuracy" in results[0]:
        return dict(enumerate(results[0]["test_accuracy"][-1]))
    return {r["settings"]["seed"]: r["test_loss"] for r in results}


def reached(stores: Stores, file: str, **wanted: Any) -> Sample:
    """What the best runs with some settings reached in the end; see `best_runs`."""
    return values(best_runs(stores, file, **wanted))


def timings(stores: Stores, suite: str, pattern: str = "") -> dict[str, Any]:
    """The ratios of times in a suite of timings, of the rows in whose names a pattern is found, by name."""
    (rows,) = (r["rows"] for r in stores["speed"].read() if r["key"] == suite)
    return {row["what"]: row["time_ratio"] for row in rows if re.search(pattern, row["what"])}
