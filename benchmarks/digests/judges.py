"""How results judge a claim: ahead (of the best of several, or in pairs), no worse, slope, or a function of its own.

A judge takes the stores and a claim, which says what to compare, and returns a finding, by scipy's tests.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from scipy.stats import ttest_ind

from ..core.tables import SIGNIFICANT, plus_minus
from ..methods import METHODS
from ..studies import table1
from ..studies.table1 import SIZES, over_sizes, series
from .reached import Measure, Sample, Settings, Stores, measure_of, reached

#: The file of Table 1.
TABLE1 = "table1"


class Finding(NamedTuple):
    """What some results say about a claim."""

    holds: bool | None  # None: they do not suffice
    figure: str = ""
    n: str = ""
    p: str = ""
    word: str = ""  # beside the verdict, where a difference is there that does not settle the claim
    difference: str = ""  # with its interval, of those that tests judge


def significant(holds: bool, p: float, figure: str, n: object, difference: str = "") -> Finding:
    """What a test says: nothing, if its p is not significant."""
    return Finding(holds if p < SIGNIFICANT else None, figure, str(n), f"{p:.2g}", difference=difference)


class Claim(NamedTuple):
    """One claim, and how results judge it.

    Example:
        >>> each = [{"activation": "tanh"}, {"activation": "relu"}]
        >>> claim = Claim("A is ahead of B", "cnn", ahead, {"method": "a"}, [{"method": "b"}], each)
        >>> [part.own for part in claim.parts]
        [{'activation': 'tanh', 'method': 'a'}, {'activation': 'relu', 'method': 'a'}]
    """

    text: str
    file: str  # of results
    judge: Callable[[Stores, "Claim"], Finding]
    own: Settings = MappingProxyType({})
    others: Sequence[Settings] = ()
    each: Sequence[Settings] = ({},)  # beside own and others; it is claimed with all of them
    against: str = ""  # what pages call the others

    @property
    def parts(self) -> list["Claim"]:
        """The claims that it is made of, which have nothing beside."""
        return [
            self._replace(own={**more, **self.own}, others=[{**more, **other} for other in self.others], each=({},))
            for more in self.each
        ]

    def finding(self, stores: Stores) -> Finding:
        """The verdict; undecided where results are missing."""
        with suppress(LookupError):
            return every([part.judge(stores, part) for part in self.parts])
        return Finding(None)


def every(findings: Sequence[Finding]) -> Finding:
    """All of several findings hold; one that does not is enough against it."""
    verdicts = [finding.holds for finding in findings]
    holds = False if False in verdicts else None if None in verdicts else True

    def joined(name: str) -> str:
        return "; ".join(dict.fromkeys(filter(None, (getattr(finding, name) for finding in findings))))

    p = "; ".join(finding.p for finding in findings if finding.p)  # of every difference, if two are alike
    return Finding(holds, joined("figure"), joined("n"), p, joined("word"), joined("difference"))


def row(stores: Stores, method: str, activation: str, file: str = TABLE1) -> Sample:
    """Every seed's mean over the batch sizes of Table 1."""
    by_size = series(stores[file].read()).get((method, activation), {})
    if set(by_size) != set(SIZES):
        raise LookupError(f"{file} has not every batch size of {method}, {activation}.")
    return dict(enumerate(over_sizes(by_size)))


def sample(stores: Stores, file: str, settings: Settings) -> Sample:
    """What a claim's runs reached: of Table 1 over batch sizes, of any other file in the end."""
    if file == TABLE1:
        return row(stores, **settings)
    return reached(stores, file, **settings)


def label(settings: Settings) -> str:
    """A method, and the optimizer if the settings say one."""
    return ", ".join([METHODS[settings["method"]].label, *filter(None, [settings.get("optimizer")])])


# The judges.
def ahead(stores: Stores, claim: Claim) -> Finding:
    """Own is better than the best of the others."""
    others = {label(other): sample(stores, claim.file, other) for other in claim.others}
    return lead(sample(stores, claim.file, claim.own), others, measure_of(stores, claim.file))


def no_worse(stores: Stores, claim: Claim, *, margin: float = 1.0) -> Finding:
    """Own is ahead of the other, or within the margin."""
    ours, theirs = (sample(stores, claim.file, settings) for settings in (claim.own, *claim.others))
    return within(ours, theirs, margin, measure_of(stores, claim.file))


def slope(stores: Stores, claim: Claim, *, sign: int) -> Finding:
    """The line of accuracy over batch size falls (sign −1) or rises."""
    method, activation = claim.own["method"], claim.own["activation"]
    seeds = row(stores, method, activation, claim.file)
    fitted = table1.line(series(stores[claim.file].read())[method, activation])
    assert fitted is not None  # `row` has looked
    figure = f"{METHODS[method].label} {100 * fitted.slope:+.2f} ± {100 * fitted.stderr:.2f} points per 100"
    return significant(fitted.slope * sign > 0, fitted.pvalue, figure, len(seeds))


falls, rises = (partial(slope, sign=sign) for sign in (-1, 1))


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
    sign = -1 if measure.is_lower_better else 1
    shifted, fixed = [sign * value + margin for value in ours.values()], [sign * value for value in theirs.values()]
    behind = float(ttest_ind(shifted, fixed, equal_var=False, alternative="greater").pvalue)
    p, difference = min(1.0, 2 * min(behind, 1 - behind)), measure.difference(ours, theirs)
    figure, text = _means(ours, theirs, measure), measure.amount(difference).text
    return significant(behind < 0.5, p, figure, difference.n, text)


def _means(ours: Sample, theirs: Sample, measure: Measure) -> str:
    """Both means; of pairs the difference says more."""
    digits = 3 if measure.unit == "nats" else 2
    means = (plus_minus([*sample.values()], digits) for sample in (ours, theirs))
    return "" if measure.has_pairs else " against ".join(means)
