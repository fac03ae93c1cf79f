"""Claims, judged by the committed results: a verdict, the figures, n and p, by scipy's tests."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from scipy.stats import ttest_ind

from ..core.store import Result, Store, setting
from ..core.study import protocol
from ..core.table import SIGNIFICANT, Row, grouped, mean_and_error, plus_minus, welch
from ..fields.report import arm, chosen, compared, errors
from ..language.train import final_validation_loss, worth
from ..methods import METHODS, having
from ..studies import isometry_training, mechanism, table1
from ..studies.papers import cells
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
    hint: Judge | None = None  # what shorter runs say meanwhile; it decides nothing
    command: str = ""  # that would decide it, where no recipe makes its files

    def found(self, stores: Stores) -> Finding:
        """The verdict; undecided where results are missing."""
        for judge in filter(None, (self.judge, self.hint)):
            with suppress(LookupError):
                found = judge(stores)
                return found if judge is self.judge else found._replace(holds=None)
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
    return tested(holds, p, _pair(ours, theirs, lower, against), f"{len(ours)}, {len(theirs)}")


@later
def level(
    stores: Stores, own: Sample, other: Sample, margin: float, *, lower: bool = False, or_ahead: bool = False
) -> Finding:
    """The 95 % interval of the difference lies within a margin, or wherever it is better, if that will do as well.

    Outside of it the claim does not hold. Between the two a difference may still be there.
    """
    ours, theirs = own(stores), other(stores)
    test = ttest_ind(ours, theirs, equal_var=False)
    low, high = test.confidence_interval(0.95)
    least, most = (-high, -low) if lower else (low, high)  # how far own may be ahead
    holds = True if least > -margin and (or_ahead or most < margin) else None
    if most < -margin or (least > margin and not or_ahead):
        holds = False
    word = "" if holds is not None else "worse" if most < 0 else "better" if least > 0 else ""
    figure = f"{_pair(ours, theirs, lower)}, 95 % from {low:+.3g} to {high:+.3g}"
    return Finding(holds, figure, f"{len(ours)}, {len(theirs)}", f"{test.pvalue:.2g}", word)


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


def line(claim: Claim, found: Finding, command: str = "") -> Row:
    """The line of a claim: verdict, figures, n, p, the files that it is judged by, and what would decide it."""
    verdict = f"**{VERDICTS[found.holds]}**" + (f", {found.word}" if found.word else "")
    return [claim.text, verdict, found.figure, found.n, found.p, claim.files, f"`{command}`" if command else ""]


#: Of a table of such lines.
HEADER = ["claim", "verdict", "figures", "n", "p", "results", "what would decide it"]


TABLE1 = "table1"


def rivals(names: Iterable[str], of: Callable[[str], Sample], own: str = "") -> dict[str, Sample]:
    """What several methods reached, by label; one's own is left out."""
    return {METHODS[name].label: of(name) for name in names if name != own}


# Table 1 and the figures along widths.
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


def slopes(methods: list[str], activation: str, sign: int, file: str = TABLE1) -> Judge:
    """All of several methods fall with batch size, or rise."""
    return every([slope(method, activation, sign, file) for method in methods])


@later
def along(
    stores: Stores, file: str, own: str, others: Sequence[str],
    keep: Callable[[str, float], bool] = lambda panel, place: True,
) -> Finding:  # fmt: skip
    """Own is better than the best of the others at every place of a sweep that counts."""
    found = [
        best(_last(methods[own][place]), {name: _last(methods[name][place]) for name in others})(stores).holds
        for panel, methods in cells(runs(stores, file), "width").items()
        for place in methods.get(own, ())
        if keep(panel, place)
    ]
    won, lost = found.count(True), found.count(False)
    figure = f"ahead at {won} of {len(found)} widths and depths, behind at {lost}"
    return Finding(True if won == len(found) else False if lost else None, figure)


def _last(results: list[Result]) -> Sample:
    return lambda stores: results[0]["test_accuracy"][-1]


@later
def overtakes(stores: Stores, file: str) -> Finding:
    """Affine-like passes LayerNorm, which learns faster, at about the twentieth epoch."""
    alike = partial(runs, stores, file, activation="tanh", batch_size=32)
    norm, own = (alike(method=name)[0]["test_accuracy"] for name in ("layernorm", "affine-like"))
    means = enumerate(zip(map(statistics.fmean, norm), map(statistics.fmean, own), strict=True), start=1)
    last = max((epoch for epoch, (other, ours) in means if other > ours), default=0)
    return Finding(10 <= last <= 30, f"behind until epoch {last} of {len(norm)}", str(len(norm[0])))


# What a step does.
def _gains(stores: Stores, *names: str) -> dict[str, list[tuple[float, float]]]:
    subjects = stores["divergence"].read()[-1]["subjects"]
    return {n: [(layer["gain"][0], layer["gain"][2]) for layer in subjects[n]["start"]["layers"]] for n in names}


def plain_gain(stores: Stores) -> Finding:
    """Every row's own gain of the plain layer is above 1."""
    gains = _gains(stores, "none")["none"]
    figure = " and ".join(f"{low:.2f} to {high:.2f}" for low, high in gains)
    return Finding(all(low > 1 for low, _ in gains), f"own gain {figure} (quartiles, by layer)")


def own_gain(stores: Stores) -> Finding:
    """It is 1, or 2, in the forms that cancel it."""
    found = _gains(stores, "affine-like", "norm-like", "proportional", "disproportional")
    wanted = {name: 2.0 if name == "norm-like" else 1.0 for name in found}
    off = max(abs(end / wanted[name] - 1) for name, layers in found.items() for layer in layers for end in layer)
    return Finding(off < 1e-4, f"own gain 1, 2 with norm-like layers at η; largest deviation {off:.0e}")


def cheap(stores: Stores) -> Finding:
    """What a corrected layer costs without Jacobians, and what whole steps cost without and with them."""
    rows = next(suite for suite in stores["speed"].read() if suite["key"] == "layers")["rows"]

    def times(part: str, end: str) -> list[float]:
        return [row["time_ratio"]["median"] for row in rows if part in row["what"] and row["what"].endswith(end)]

    linear, without, by_jacobians = (
        times("Linear", "Proportional"),
        times("step", "GradientOnly"),
        times("", "backward"),
    )
    ends = (f"{min(found):.3g} to {max(found):.3g}" for found in (linear, without, by_jacobians))
    figure = "{} times the plain linear layer, whole steps of small networks {} times, by Jacobians {}".format(*ends)
    return Finding(False, figure)


@later
def drop(stores: Stores, own: Sequence[str], methods: Sequence[str], activation: str) -> Finding:
    """From their best epoch to the last each of own loses more than any other method, at every batch size there is."""
    lost: dict[int, dict[str, float]] = {}
    for result in runs(stores, TABLE1, activation=activation):
        if result["settings"]["method"] in methods:
            means = [statistics.fmean(seeds) for seeds in result["test_accuracy"]]
            lost.setdefault(result["settings"]["batch_size"], {})[result["settings"]["method"]] = max(means) - means[-1]
    pairs = [
        ([by_method[name] for name in own], [by_method[name] for name in methods if name not in own])
        for by_method in lost.values() if len(by_method) == len(methods)
    ]  # fmt: skip
    if not pairs:
        raise LookupError(f"{TABLE1} has not every method at any batch size, {activation}.")
    ours, others = ([each for pair in pairs for each in pair[side]] for side in (0, 1))
    figure = f"lose {min(ours):.1f} to {max(ours):.1f} points, others {min(others):.1f} to {max(others):.1f}"
    return Finding(all(min(a) > max(b) for a, b in pairs), figure, f"{len(pairs)} batch sizes")


@later
def thesis(stores: Stores, file: str) -> Finding:
    """Cosine and accuracy of tuned runs have a positive rank correlation."""
    members = mechanism.groups(stores[file].read())["all"]
    rank = mechanism.rank(members, "cosine")
    figure = f"rank correlation of cosine and accuracy {rank.statistic:+.2f}"
    return tested(rank.statistic > 0, rank.pvalue, figure, len(members))


# Unit consistency.
@later
def spread(stores: Stores, method: str, optimizer: str) -> Finding:
    """A method's accuracies over gauges of σ = 2 lie within two points."""
    alike = partial(runs, stores, "uc-rescaled", optimizer=optimizer, rescaled=2.0)
    found, other = (alike(method=name)[0]["test_accuracy"][-1] for name in (method, "none"))
    ends = f"{min(found):.2f} to {max(found):.2f}"
    figure = f"{optimizer}: {ends} over gauges of σ = 2, plain {min(other):.2f} to {max(other):.2f}"
    return Finding(max(found) - min(found) < 2, figure, str(len(found)))


@later
def worst(stores: Stores, file: str, along: str, rival: str = "none") -> Finding:
    """Unit-consistent SGD loses less from the easiest place to the hardest than a rival with SGD does."""
    falls = []
    for method in ("uc-network", rival):
        by_place = cells(runs(stores, file, method=method, optimizer="sgd"), along)
        places = [at for methods in by_place.values() for at in methods[method].values()]
        means = [max(statistics.fmean(r["test_accuracy"][-1]) for r in at) for at in places]
        falls.append(max(means) - min(means))
    own, other = falls
    return Finding(own < other - 1, f"falls by {own:.1f} points, {METHODS[rival].label} by {other:.1f}")


# Isometry.
def depth_quartiles(stores: Stores, activation: str, variant: str, quantity: str = "measured") -> list[float] | None:
    """Quartiles over draws behind the last layer."""
    result = stores["isometry-depth"].read()[-1]
    return result["activations"][activation][quantity][variant][result["depth"]]


@later
def _gap(stores: Stores, activation: str, own: str, other: str, relation: str, quantity: str = "measured") -> Finding:
    """Quartiles over draws overlap ("level"), or those of the one lie below those of the other ("below")."""
    ours, theirs = (depth_quartiles(stores, activation, variant, quantity) for variant in (own, other))
    n = f"{stores['isometry-depth'].read()[-1]['seeds']} draws"
    words = ["out of range" if each is None else f"{each[1]:.2g}" for each in (ours, theirs)]
    figure = f"{activation} {words[0]} against {words[1]}"
    if ours is None or theirs is None:
        return Finding(relation == "below" and theirs is None and ours is not None, figure, n)
    overlap = ours[0] <= theirs[2] and theirs[0] <= ours[2]
    return Finding(overlap if relation == "level" else None if overlap else ours[1] < theirs[1], figure, n)


def gaps(activations: str, own: str, other: str, relation: str, quantity: str = "measured") -> Judge:
    """`_gap` of several activations."""
    return every([_gap(name, own, other, relation, quantity) for name in activations.split(", ")])


def bounded(stores: Stores) -> Finding:
    """The gap at infinite width lies below its bound at every depth."""
    found = stores["isometry-depth"].read()[-1]["activations"]
    pairs = [pair for each in found.values() for pair in zip(each["mean_field"], each["bound"], strict=True)]
    return Finding(all(gap <= bound for gap, bound in pairs), f"{len(found)} activations, every depth")


def least_gain(stores: Stores) -> Finding:
    """No norm of any network lowers isometry."""
    found = isometry_training.by_depth(stores["isometry-training"].read())[10]
    stages = "start", "trained"
    least = {name: min(min(isometry_training.least_gains(s, at)) for at in stages) for name, s in found.items()}
    lowered = {name: change for name, change in least.items() if change < 0}
    figure = f"lowered with {', '.join(f'{name} ({change:.0e})' for name, change in lowered.items()) or 'none'}"
    return Finding(not lowered, f"{figure} of {len(found)} activations", str(sum(map(len, found.values()))))


@later
def faster(stores: Stores, file: str, layers: int, *, wanted: bool) -> Finding:
    """The training loss falls with β over activations; or does not, if that is what is claimed."""
    found = isometry_training.by_depth(stores[file].read())[layers]
    rank = isometry_training.correlations(found)["the loss at the end of training"]
    figure = f"rank correlation of β with the training loss {rank.statistic:+.2f}, {layers} layers"
    return tested((rank.statistic < 0) is wanted, rank.pvalue, figure, len(found))


def widths(stores: Stores) -> Finding:
    """The gap behind the last norm is the same within a tenth."""
    last = sorted(-math.log(r["isometry"]["start"][-1]["isometry"]) for r in stores["isometry-widths"].read())
    return Finding(last[-1] < 1.1 * last[0], f"gap {last[0]:.2f} to {last[-1]:.2f} behind five layers", "4 networks")


# Coordinate networks, equations.
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
    sign = -1 if lower else 1

    def signed(error: float) -> float:
        return sign * shown(error)

    difference, _, n = compared(found[0], found[1], signed)
    p = compared(found[0], found[1], signed, margin).p
    return tested(difference > margin, p, f"{sign * difference:+.2f}", n)


def one_rate(stores: Stores) -> Finding:
    """How far BatchIdeal ends below its best, at rates from 0.3 to 3, over all batch sizes."""
    found = grouped(runs(stores, "rates", method="batch-ideal-default"), setting("batch_size"))
    means = [{r["settings"]["lr"]: statistics.fmean(r["test_accuracy"][-1]) for r in own} for own in found.values()]
    worst = max(max(at.values()) - min(at[lr] for lr in (0.3, 1.0, 3.0)) for at in means)
    sizes = ", ".join(map(str, sorted(found)))
    return Finding(worst < 2, f"at most {worst:.1f} points below its best from 0.3 to 3, batches of {sizes}")


#: Table 1 after a fifth of its epochs.
SHORT = "table1-reduced"
PAPERS_OWN = having("papers")
swept, cnn, pool = (partial(reached, name) for name in ("uc-sweep", "cnn", "cnn-pool"))
tanh, leaky = (partial(row, activation=name) for name in ("tanh", "leaky-relu"))
short, short_leaky = partial(tanh, file=SHORT), partial(leaky, file=SHORT)
