"""How results judge a claim: ahead (of the best of several), level, in pairs, slope, or a function of its own.

A judge takes the stores and a claim, which says what to compare, and returns a finding, by scipy's tests.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from scipy.stats import ttest_1samp, ttest_ind

from ..core.arms import chosen, compared, errors
from ..core.store import Result, Store
from ..core.study import protocol
from ..core.tables import SIGNIFICANT, grouped, mean_and_error, plus_minus, welch
from ..grids import best_optimizer
from ..methods import METHODS
from ..problems.language import final_validation_loss, worth
from ..problems.pictures import psnr
from ..studies import table1
from ..studies.table1 import SIZES, over_sizes, series

Stores = Mapping[str, Store]
#: Settings of runs; a set stands for any of its members, and None for a run without the setting.
Settings = Mapping[str, Any]
#: What every seed reached.
Sample = list[float]
#: The file of Table 1.
TABLE1 = "table1"
#: The optimizer with which a method was best on held-out data.
BEST = "best"


class Finding(NamedTuple):
    """What some results say about a claim."""

    holds: bool | None  # None: they do not suffice
    figure: str = ""
    n: str = ""
    p: str = ""
    word: str = ""  # beside the verdict, where a difference is there that does not settle the claim
    difference: str = ""  # of the figure, with its interval


def significant(holds: bool, p: float, figure: str, n: object, difference: str = "") -> Finding:
    """What a test says: nothing, if its p is not significant."""
    return Finding(holds if p < SIGNIFICANT else None, figure, str(n), f"{p:.2g}", difference=difference)


class Claim(NamedTuple):
    """One claim, and how results judge it.

    Example:
        >>> claim = Claim("A is ahead of B", "cnn, cnn-pool", ahead, {"method": "a"}, [{"method": "b"}])
        >>> [(part.files, part.own) for part in claim.parts]
        [('cnn', {'method': 'a'}), ('cnn-pool', {'method': 'a'})]
    """

    text: str
    files: str  # of results; it is claimed of all of them
    judge: Callable[[Stores, "Claim"], Finding]
    own: Settings = MappingProxyType({})
    others: Sequence[Settings] = ()
    margin: float = 0.0
    each: Sequence[Settings] = ({},)  # beside own and others; it is claimed with all of them
    in_calls: bool = False  # whether the table of calls has its difference

    @property
    def parts(self) -> list["Claim"]:
        """The claims that it is made of, which have one file and nothing beside."""
        return [
            self._replace(
                files=file, own={**more, **self.own}, others=[{**more, **other} for other in self.others], each=({},)
            )
            for file in self.files.split(", ") for more in self.each
        ]  # fmt: skip

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


# What runs reached.
def runs(stores: Stores, file: str, **wanted: Any) -> list[Result]:
    """The results of a file that have the wanted settings; no results are a LookupError."""
    any_of = {name: value if isinstance(value, set) else (value,) for name, value in wanted.items()}
    matching = [
        r for r in stores[file].read() if all(r["settings"].get(name) in values for name, values in any_of.items())
    ]
    if not matching:
        raise LookupError(f"{file} has no run with {wanted}.")
    return matching


def reached(stores: Stores, file: str, method: str | None, **wanted: Any) -> Sample:
    """What every seed of a method's run with some settings reached in the end.

    Of images the accuracies, of searches alone the best on held-out data. Of a language model, of the longest runs, the
    test losses at the lowest validation loss.

    Raises:
        ValueError: several runs that were tested have them, and to take the best would be to choose by test accuracy.
    """
    matching = runs(stores, file, method=method, **wanted)
    if "test_accuracy" in matching[0]:
        last = [r for r in matching if not r["settings"].get("validation")]
        if len(last) > 1:
            raise ValueError(f"{len(last)} runs of {method!r} in {file!r} have {wanted}; say what tells them apart.")
        return max((r["test_accuracy"][-1] for r in last or matching), key=statistics.fmean)
    longest = max(r["settings"]["steps"] for r in matching)
    groups = grouped((r for r in matching if r["settings"]["steps"] == longest), protocol("seed")).values()
    best = min(groups, key=lambda group: statistics.fmean(worth(final_validation_loss(r)) for r in group))
    return [r["test_loss"] for r in best]


def row(stores: Stores, method: str, activation: str, file: str = TABLE1) -> Sample:
    """Every seed's mean over the batch sizes of Table 1."""
    by_size = series(stores[file].read()).get((method, activation), {})
    if set(by_size) != set(SIZES):
        raise LookupError(f"{file} has not every batch size of {method}, {activation}.")
    return over_sizes(by_size)


def sample(stores: Stores, file: str, settings: Settings) -> Sample:
    """What every seed of a claim's runs reached: of Table 1 over batch sizes, of any other file in the end."""
    if file == TABLE1:
        return row(stores, **settings)
    if settings.get("optimizer") == BEST:
        optimizer = best_optimizer(stores[file], settings["method"], settings["activation"])
        settings = {**settings, "optimizer": optimizer}
    return reached(stores, file, **settings)


def label(settings: Settings) -> str:
    """A method, and the optimizer if the settings say one."""
    return ", ".join([METHODS[settings["method"]].label, *filter(None, [settings.get("optimizer")])])


# The judges.
def ahead(stores: Stores, claim: Claim) -> Finding:
    """Own is better than the best of the others by Welch's test."""
    others = {label(other): sample(stores, claim.files, other) for other in claim.others}
    return lead(sample(stores, claim.files, claim.own), others, lower=has_losses(stores, claim.files))


def level(stores: Stores, claim: Claim, *, or_ahead: bool = False) -> Finding:
    """Own is within the margin of the other, or ahead, if that will do as well."""
    ours, theirs = (sample(stores, claim.files, settings) for settings in (claim.own, *claim.others))
    return within(ours, theirs, claim.margin, lower=has_losses(stores, claim.files), or_ahead=or_ahead)


level_or_ahead = partial(level, or_ahead=True)


def paired(stores: Stores, claim: Claim) -> Finding:
    """An arm has lower errors than the other by the paired t test over the problems that both learned.

    Its trials chose the settings of every data set, where there are several.
    """

    def final(settings: Settings) -> dict[tuple[Any, ...], float]:
        by_data = grouped(runs(stores, claim.files, **settings), lambda r: r["settings"].get("data_set"))
        return errors(r for results in by_data.values() for r in chosen(results))

    own, other = map(final, (claim.own, *claim.others))
    picture = claim.files == "coordinates"
    return in_pairs(own, other, psnr if picture else math.log10, lower=not picture)


def slope(stores: Stores, claim: Claim, *, sign: int) -> Finding:
    """The line of accuracy over batch size falls (sign −1) or rises."""
    method, activation = claim.own["method"], claim.own["activation"]
    seeds = row(stores, method, activation, claim.files)
    fitted = table1.line(series(stores[claim.files].read())[method, activation])
    assert fitted is not None  # `row` has looked
    figure = f"{METHODS[method].label} {100 * fitted.slope:+.2f} ± {100 * fitted.stderr:.2f} points per 100"
    return significant(fitted.slope * sign > 0, fitted.pvalue, figure, len(seeds))


falls, rises = (partial(slope, sign=sign) for sign in (-1, 1))


# What they say of numbers.
def has_losses(stores: Stores, file: str) -> bool:
    """Whether a file's runs reach losses, of which less is better."""
    return "test_accuracy" not in stores[file].read()[0]


def lead(ours: Sample, others: Mapping[str, Sample], *, lower: bool = False) -> Finding:
    """Ours are better than the best of the others, which has its name in the figure if there are several."""
    name = (min if lower else max)(others, key=lambda other: mean_and_error(others[other])[0])
    theirs = others[name]
    difference, p = welch(ours, theirs)
    holds = difference < 0 if lower else difference > 0
    return significant(holds, p, *_pair(ours, theirs, lower, f" ({name})" if len(others) > 1 else ""))


def within(ours: Sample, theirs: Sample, margin: float, *, lower: bool = False, or_ahead: bool = False) -> Finding:
    """The 95 % interval of the difference lies within a margin, or wherever it is better, if that will do as well.

    Outside of it the claim does not hold. Between the two a difference may still be there. The p is of the verdict, as
    small as 0.05 where the interval ends at the margin: twice the greater of two one-sided tests, or, where the claim
    does not hold, twice that of the side on which it fails.
    """
    sign = -1 if lower else 1

    def beyond(bound: float) -> float:
        """One-sided p against ours being ahead by no more than a bound."""
        shifted, fixed = [sign * value - bound for value in ours], [sign * value for value in theirs]
        return float(ttest_ind(shifted, fixed, equal_var=False, alternative="greater").pvalue)

    behind, ahead_of = beyond(-margin), 0.0 if or_ahead else 1 - beyond(margin)
    inside = 2 * max(behind, ahead_of)
    outside = 2 * min(1 - behind, 1 - ahead_of)
    holds = True if inside < SIGNIFICANT else False if outside < SIGNIFICANT else None
    ends = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    least, most = sorted(sign * end for end in ends)  # how far ours may be ahead
    word = "" if holds is not None else "worse" if most < 0 else "better" if least > 0 else ""
    figure, n, difference = _pair(ours, theirs, lower)
    p = outside if holds is False else min(1.0, inside)
    return Finding(holds, figure, n, f"{p:.2g}", word, difference)


def in_pairs(
    own: Mapping[tuple[Any, ...], float], other: Mapping[tuple[Any, ...], float], shown: Callable[[float], float], *,
    lower: bool,
) -> Finding:  # fmt: skip
    """Errors by problem, as they are shown, are better than others."""
    difference, p, n = compared(own, other, shown)
    ends = ttest_1samp([shown(own[key]) - shown(other[key]) for key in own if key in other], 0.0)
    figure, short = _with_interval(f"{difference:+.2f}", *ends.confidence_interval(0.95))
    return significant(difference < 0 if lower else difference > 0, p, figure, n, short)


def _with_interval(difference: str, low: float, high: float) -> tuple[str, str]:
    """A difference with its interval, for a file and for a page."""
    return f"{difference}, 95 % from {low:+.3g} to {high:+.3g}", f"{difference} [{low:+.3g}, {high:+.3g}]"


def _pair(ours: Sample, theirs: Sample, lower: bool, name: str = "") -> tuple[str, str, str]:
    """Figure, n and difference of two samples."""
    digits, (difference, _) = 3 if lower else 2, welch(ours, theirs)
    ends = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    figure, short = _with_interval(f"{difference:+.{digits}f}", *ends)
    means = f"{plus_minus(ours, digits)} against {plus_minus(theirs, digits)}{name}"
    return f"{means}, {figure}", f"{len(ours)}, {len(theirs)}", short
