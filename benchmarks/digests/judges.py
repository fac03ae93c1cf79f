"""Claims, judged by the committed results: a verdict, the figures, n and p, by scipy's tests."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from scipy.stats import ttest_1samp, ttest_ind

from ..core.arms import arm, chosen, compared, errors
from ..core.store import Result, Store
from ..core.study import protocol
from ..core.tables import SIGNIFICANT, Row, grouped, mean_and_error, plus_minus, welch
from ..methods import METHODS
from ..problems.language import final_validation_loss, worth
from ..studies import table1
from ..studies.table1 import SIZES, over_sizes, series

Stores = Mapping[str, Store]
#: Stores → what every seed reached; a run that is not there is a LookupError.
Sample = Callable[[Stores], list[float]]
VERDICTS = {True: "holds", False: "does not hold", None: "undecided"}

More = ParamSpec("More")
Found = TypeVar("Found")


def later(read: Callable[Concatenate[Stores, More], Found]) -> Callable[More, Callable[[Stores], Found]]:
    """Turn a function of stores and more into one of the rest alone, which returns a function of stores."""
    return lambda *arguments, **options: lambda stores: read(stores, *arguments, **options)


class Finding(NamedTuple):
    """What some results say about a claim."""

    holds: bool | None  # None: they do not suffice
    figure: str = ""
    n: str = ""
    p: str = ""
    word: str = ""  # beside the verdict, where a difference is there that does not settle the claim


def tested(holds: bool, p: float, figure: str, n: object) -> Finding:
    """What a test says: nothing, if its p is not significant."""
    return Finding(holds if p < SIGNIFICANT else None, figure, str(n), f"{p:.2g}")


Judge = Callable[[Stores], Finding]


class Claim(NamedTuple):
    """One claim, and how results judge it."""

    text: str
    files: str  # of results that it is judged by
    judge: Judge
    in_calls: bool = False  # whether the table of calls has its difference

    def found(self, stores: Stores) -> Finding:
        """The verdict; undecided where results are missing."""
        with suppress(LookupError):
            return self.judge(stores)
        return Finding(None)


def runs(stores: Stores, file: str, **wanted: object) -> list[Result]:
    """The results of a file that have the wanted settings, None being without one; no results are a LookupError."""
    found = [r for r in stores[file].read() if all(r["settings"].get(name) == wanted[name] for name in wanted)]
    if not found:
        raise LookupError(f"{file} has no run with {wanted}.")
    return found


@later
def reached(stores: Stores, file: str, method: str | None, *, of: str = "test_loss", **wanted: object) -> list[float]:
    """What every seed of a method's run with some settings reached in the end.

    Of images the accuracies, of searches alone the best on held-out data. Of a language model, of the longest runs, the
    losses at the lowest validation loss.

    Raises:
        ValueError: several runs that were tested have them, and to take the best would be to choose by test accuracy.
    """
    found = runs(stores, file, method=method, **wanted)
    if "test_accuracy" in found[0]:
        last = [r for r in found if not r["settings"].get("validation")]
        if len(last) > 1:
            raise ValueError(f"{len(last)} runs of {method!r} in {file!r} have {wanted}; say what tells them apart.")
        return max((r["test_accuracy"][-1] for r in last or found), key=statistics.fmean)
    longest = max(r["settings"]["steps"] for r in found)
    key = protocol("seed")
    groups = grouped((r for r in found if r["settings"]["steps"] == longest), key).values()
    best = min(groups, key=lambda own: statistics.fmean(worth(final_validation_loss(r)) for r in own))
    return [r["test_loss"] if of == "test_loss" else r[of][-1] for r in best]


def compare(
    file: str, own: Mapping[str, Any], other: Mapping[str, Any], *,
    margin: float | None = None, or_ahead: bool = False, lower: bool = False,
) -> "Judge":  # fmt: skip
    """Runs of one file with some settings are ahead of those with others, or within a margin level with them."""
    samples = reached(file, **own), reached(file, **other)
    return ahead(*samples, lower=lower) if margin is None else level(*samples, margin, lower=lower, or_ahead=or_ahead)


@later
def ahead(stores: Stores, own: Sample, other: Sample, *, lower: bool = False, against: str = "") -> Finding:
    """Own is better than the other by Welch's test; lower is better for losses."""
    ours, theirs = own(stores), other(stores)
    difference, p = welch(ours, theirs)
    holds = difference < 0 if lower else difference > 0
    ends = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return tested(holds, p, _pair(ours, theirs, lower, against) + _within(*ends), f"{len(ours)}, {len(theirs)}")


@later
def level(
    stores: Stores, own: Sample, other: Sample, margin: float, *, lower: bool = False, or_ahead: bool = False
) -> Finding:
    """The 95 % interval of the difference lies within a margin, or wherever it is better, if that will do as well.

    Outside of it the claim does not hold. Between the two a difference may still be there. The p is of the verdict, as
    small as 0.05 where the interval ends at the margin: twice the greater of two one-sided tests, or, where the claim
    does not hold, twice that of the side on which it fails.
    """
    ours, theirs = own(stores), other(stores)
    low, high = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    sign = -1 if lower else 1

    def beyond(bound: float) -> float:
        """One-sided p against own being ahead by no more than a bound."""
        shifted, against = [sign * value - bound for value in ours], [sign * value for value in theirs]
        return float(ttest_ind(shifted, against, equal_var=False, alternative="greater").pvalue)

    behind, ahead_of = beyond(-margin), 0.0 if or_ahead else 1 - beyond(margin)
    inside = 2 * max(behind, ahead_of)
    outside = 2 * min(1 - behind, 1 - ahead_of)
    holds = True if inside < SIGNIFICANT else False if outside < SIGNIFICANT else None
    least, most = sorted((sign * low, sign * high))  # how far own may be ahead
    word = "" if holds is not None else "worse" if most < 0 else "better" if least > 0 else ""
    figure = _pair(ours, theirs, lower) + _within(low, high)
    p = outside if holds is False else min(1.0, inside)
    return Finding(holds, figure, f"{len(ours)}, {len(theirs)}", f"{p:.2g}", word)


@later
def best(stores: Stores, own: Sample, others: Mapping[str, Sample], *, lower: bool = False) -> Finding:
    """Own is better than the best of the others."""
    found = {label: sample(stores) for label, sample in others.items()}
    label = (min if lower else max)(found, key=lambda name: mean_and_error(found[name])[0])
    return ahead(own, others[label], lower=lower, against=f" ({label})")(stores)


@later
def every(stores: Stores, judges: Sequence[Judge]) -> Finding:
    """All of several findings hold; one that does not is enough against it."""
    found = [one(stores) for one in judges]
    verdicts = [one.holds for one in found]
    holds = False if False in verdicts else None if None in verdicts else True
    figure, n = ("; ".join(dict.fromkeys(each)) for each in list(zip(*found, strict=True))[1:3])
    return Finding(holds, figure, n, "; ".join(one.p for one in found if one.p))


def _pair(ours: list[float], theirs: list[float], lower: bool, against: str = "") -> str:
    digits, (difference, _) = 3 if lower else 2, welch(ours, theirs)
    return f"{plus_minus(ours, digits)} against {plus_minus(theirs, digits)}{against}, {difference:+.{digits}f}"


def _within(low: float, high: float) -> str:
    return f", 95 % from {low:+.3g} to {high:+.3g}"


def line(claim: Claim, found: Finding, command: str = "") -> Row:
    """The line of a claim: verdict, figures, n, p, the files that it is judged by, and what would decide it."""
    verdict = f"**{VERDICTS[found.holds]}**" + (f", {found.word}" if found.word else "")
    return [claim.text, verdict, found.figure, found.n, found.p, claim.files, f"`{command}`" if command else ""]


#: Of a table of such lines.
HEADER = ["claim", "verdict", "figures", "n", "p", "results", "what would decide it"]


def rivals(names: Iterable[str], of: Callable[[str], Sample], own: str = "") -> dict[str, Sample]:
    """What several methods reached, by label; one's own is left out."""
    return {METHODS[name].label: of(name) for name in names if name != own}


#: The file of Table 1.
TABLE1 = "table1"


@later
def row(stores: Stores, method: str, activation: str, file: str = TABLE1) -> list[float]:
    """Every seed's mean over the paper's batch sizes."""
    by_size = series(stores[file].read()).get((method, activation), {})
    if set(by_size) != set(SIZES):
        raise LookupError(f"{file} has not every batch size of {method}, {activation}.")
    return over_sizes(by_size)


@later
def slope(stores: Stores, method: str, activation: str, sign: int, file: str = TABLE1) -> Finding:
    """The line of accuracy over batch size falls (sign −1) or rises."""
    seeds = row(method, activation, file)(stores)
    fitted = table1.line(series(stores[file].read())[method, activation])
    assert fitted is not None  # `row` has looked
    figure = f"{METHODS[method].label} {100 * fitted.slope:+.2f} ± {100 * fitted.stderr:.2f} points per 100"
    return tested(fitted.slope * sign > 0, fitted.pvalue, figure, len(seeds))


@later
def ahead_in_pairs(
    stores: Stores, file: str, wanted: Mapping[str, Any], own: tuple[Any, ...], other: tuple[Any, ...],
    shown: Callable[[float], float] = float, *, margin: float = 0.0, lower: bool = False,
) -> Finding:  # fmt: skip
    """An arm is ahead of another, by more than a margin, by the paired t test over the problems that both learned."""
    results = chosen(runs(stores, file, **wanted))
    found = [errors(r for r in results if arm(r) == each) for each in (own, other)]
    if not all(found):
        raise LookupError(f"{file} has not both of {own} and {other}.")
    return judged_in_pairs(found[0], found[1], shown, margin=margin, lower=lower)


def judged_in_pairs(
    own: Mapping[tuple[Any, ...], float], other: Mapping[tuple[Any, ...], float], shown: Callable[[float], float], *,
    margin: float = 0.0, lower: bool = False,
) -> Finding:  # fmt: skip
    """Errors by problem are better than others, by more than a margin, by the paired t test."""
    sign = -1 if lower else 1

    def signed(error: float) -> float:
        return sign * shown(error)

    difference, _, n = compared(own, other, signed)
    low, high = ttest_1samp([shown(own[key]) - shown(other[key]) for key in own if key in other], 0.0
                            ).confidence_interval(0.95)  # fmt: skip
    p = compared(own, other, signed, margin).p
    return tested(difference > margin, p, f"{sign * difference:+.2f}{_within(low, high)}", n)


@later
def at_length(stores: Stores, judge: Judge, file: str, epochs: int) -> Finding:
    """A finding as it is, where runs are as long as the claim's; undecided where they are shorter."""
    found, ran = judge(stores), max(r["settings"]["epochs"] for r in runs(stores, file))
    return found if ran >= epochs else found._replace(holds=None, word=f"{ran} of {epochs} epochs")
