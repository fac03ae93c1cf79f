"""How results judge a claim: ahead of the best of several, no worse, or a slope, by scipy's tests.

A judge takes the stores, the name of a file of results, settings of runs, and those of the runs they are compared with.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy.stats import ttest_ind

from ..core.tables import SIGNIFICANT, plus_minus
from ..methods import METHODS
from ..studies import table1
from .reached import Measure, Sample, Settings, Stores, measure_of, reached


class Finding(NamedTuple):
    """What some results say about a claim."""

    holds: bool | None  # None: they do not suffice
    figure: str = ""
    n: str = ""
    p: Sequence[float] = ()  # of each difference that it is made of
    difference: str = ""  # with its interval, of those that tests judge
    word: str = ""  # beside the verdict, where a difference is there that does not settle the claim


def significant(holds: bool, p: float, figure: str, n: object, difference: str = "") -> Finding:
    """What a test says: nothing, if its p is not significant."""
    return Finding(holds if p < SIGNIFICANT else None, figure, str(n), [float(f"{p:.2g}")], difference)


def sample(stores: Stores, file: str, settings: Settings) -> Sample:
    """What runs reached in the end; of Table 1 it is every seed's mean over all batch sizes."""
    if file != "table1":
        return reached(stores, file, **settings)
    by_size = table1.series(stores[file].read()).get((settings["method"], settings["activation"]), {})
    if set(by_size) != set(table1.SIZES):
        raise LookupError(f"{file} has not every batch size of {settings}.")
    return dict(enumerate(table1.over_sizes(by_size)))


def ahead(stores: Stores, file: str, runs: Settings, others: Sequence[Settings]) -> Finding:
    """They are better than the best of the others."""
    names = [", ".join(filter(None, [METHODS[other["method"]].label, other.get("optimizer")])) for other in others]
    rivals = {name: sample(stores, file, other) for name, other in zip(names, others, strict=True)}
    return lead(sample(stores, file, runs), rivals, measure_of(stores, file))


def no_worse(stores: Stores, file: str, runs: Settings, others: Sequence[Settings], margin: str) -> Finding:
    """They are ahead of the other, or within the margin."""
    ours, theirs = (sample(stores, file, settings) for settings in (runs, *others))
    return within(ours, theirs, float(margin), measure_of(stores, file))


def slope(stores: Stores, file: str, runs: Settings, others: Sequence[Settings], way: str) -> Finding:
    """The line of accuracy over batch size goes up, or down."""
    seeds = sample(stores, file, runs)
    fitted = table1.line(table1.series(stores[file].read())[runs["method"], runs["activation"]])
    assert fitted is not None  # every batch size is there
    label = METHODS[runs["method"]].label
    figure = f"{label} {100 * fitted.slope:+.2f} ± {100 * fitted.stderr:.2f} points per 100"
    return significant((fitted.slope > 0) is (way == "up"), fitted.pvalue, figure, len(seeds))


# What they say of numbers.
def lead(ours: Sample, others: Mapping[str, Sample], measure: Measure) -> Finding:
    """Ours are better than the best of the others, which has its name in the figure if there are several."""
    name = measure.best(others)
    difference = measure.difference(ours, others[name])
    if math.isnan(difference.mean):
        return Finding(None, "a run broke down", difference.n)
    figure = _means(ours, others[name], measure) + (f" ({name})" if len(others) > 1 else "")
    holds = difference.mean < 0 if measure.is_lower_better else difference.mean > 0
    return significant(holds, difference.p, figure, difference.n, measure.amount(difference).text)


def within(ours: Sample, theirs: Sample, margin: float, measure: Measure) -> Finding:
    """The 95 % interval of the difference lies above where ours are behind by a margin.

    Below it the claim does not hold. The p is of the verdict, as small as 0.05 where the interval ends at the margin:
    twice that of the one-sided test.
    """
    sign, difference = -1 if measure.is_lower_better else 1, measure.difference(ours, theirs)
    shifted, fixed = [sign * value + margin for value in ours.values()], [sign * value for value in theirs.values()]
    behind = float(ttest_ind(shifted, fixed, equal_var=False, alternative="greater").pvalue)
    p, figure = min(1.0, 2 * min(behind, 1 - behind)), _means(ours, theirs, measure)
    return significant(behind < 0.5, p, figure, difference.n, measure.amount(difference).text)


def _means(ours: Sample, theirs: Sample, measure: Measure) -> str:
    """Both means; of pairs the difference says more."""
    digits = 3 if measure.unit == "nats" else 2
    means = (plus_minus([*sample.values()], digits) for sample in (ours, theirs))
    return "" if measure.has_pairs else " against ".join(means)
