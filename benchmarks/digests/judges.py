"""How results judge a claim: by a test of being ahead, no worse or on a slope, or by numbers of the claim's own.

`claims.csv` has a judge's name and what more it is told. It takes the stores, the name of a file of results, settings
of runs, those of the runs that they are compared with, and these words.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from scipy.stats import ttest_ind

from ..core.store import Result, setting
from ..core.tables import SIGNIFICANT, estimate, grouped
from ..methods import METHODS
from ..studies import isometry_training, mechanism, table1
from ..studies.papers import cells
from .reached import ACCURACY, Measure, Sample, Settings, Stores, measure_of, reached, runs, timings, values


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
    difference = measure.difference(ours, theirs)
    less, losses = [measure.loss(own) - margin for own in ours.values()], [measure.loss(own) for own in theirs.values()]
    behind = float(ttest_ind(less, losses, equal_var=False, alternative="less").pvalue)
    p, figure = min(1.0, 2 * min(behind, 1 - behind)), _means(ours, theirs, measure)
    return significant(behind < 0.5, p, figure, difference.n, measure.amount(difference).text)


def _means(ours: Sample, theirs: Sample, measure: Measure) -> str:
    """Both means; of pairs the difference says more."""
    digits = 3 if measure.unit == "nats" else 2
    means = (estimate([*sample.values()], digits).text for sample in (ours, theirs))
    return "" if measure.has_pairs else " against ".join(means)


# What no comparison of two samples fits, by numbers of their own.
def _by_epoch(result: Result) -> list[float]:
    """The mean accuracy after every epoch."""
    return [fmean(seeds) for seeds in result["test_accuracy"]]


# Images.
def along(stores: Stores, file: str, ours: Settings, others: Sequence[Settings], *but: str) -> Finding:
    """They are better than the best of the others at every place of a sweep, or at all but some."""
    wanted = {key: value for key, value in ours.items() if key != "method"}
    name, *names = (each["method"] for each in (ours, *others))
    verdicts = [
        lead(values(at[name][width]), {other: values(at[other][width]) for other in names}, ACCURACY).holds
        for panel, at in cells(runs(stores, file, **wanted), "width").items()
        for width in at.get(name, ())
        if not f"{panel} {width:g}".replace(" ", "-").endswith(but)
    ]
    if not verdicts:
        raise LookupError(f"{file}: no width or depth of those that the claim is about.")
    won, lost = verdicts.count(True), verdicts.count(False)
    figure = f"ahead at {won} of {len(verdicts)} widths and depths, behind at {lost}"
    return Finding(True if won == len(verdicts) else False if lost else None, figure)


def overtakes(stores: Stores, file: str, ours: Settings, others: Sequence[Settings]) -> Finding:
    """They pass the other, which learns faster, at about the twentieth epoch."""
    late, early = (runs(stores, file, **each)[0] for each in (ours, *others))
    epochs = enumerate(zip(_by_epoch(late), _by_epoch(early), strict=True), start=1)
    last = max((epoch for epoch, (a, b) in epochs if b > a), default=0)
    figure = f"behind until epoch {last} of {len(late['test_accuracy'])}"
    return Finding(10 <= last <= 30, figure, str(len(early["test_accuracy"][0])))


def drop(stores: Stores, file: str, ours: Settings, others: Sequence[Settings], *names: str) -> Finding:
    """From their best epoch to the last some methods lose more than any other one, at every batch size there is."""
    rivals = {other["method"] for other in others}
    by_size = grouped(runs(stores, file, **ours, method={*names, *rivals}), setting("batch_size")).values()
    losses = [{r["settings"]["method"]: max(_by_epoch(r)) - _by_epoch(r)[-1] for r in size} for size in by_size]
    whole = [each for each in losses if each.keys() == {*names, *rivals}]
    pairs = [[[each[name] for name in side] for side in (names, rivals)] for each in whole]
    if not pairs:
        raise LookupError(f"{file} has not every method at any batch size, {ours}.")
    most, least = ([loss for pair in pairs for loss in pair[side]] for side in (0, 1))
    figure = f"lose {min(most):.1f} to {max(most):.1f} points, others {min(least):.1f} to {max(least):.1f}"
    return Finding(all(min(a) > max(b) for a, b in pairs), figure, f"{len(pairs)} batch sizes")


def flat_rates(stores: Stores, file: str, ours: Settings, others: Sequence[Settings]) -> Finding:
    """At rates from 0.3 to 3 a method ends within two points of its best, over all batch sizes."""
    by_size = grouped(runs(stores, file, **ours), setting("batch_size"))
    means = [{r["settings"]["lr"]: _by_epoch(r)[-1] for r in rs} for rs in by_size.values()]
    worst = max(max(at.values()) - min(at[lr] for lr in (0.3, 1.0, 3.0)) for at in means)
    sizes = ", ".join(map(str, sorted(by_size)))
    return Finding(worst < 2, f"at most {worst:.1f} points below its best from 0.3 to 3, batches of {sizes}")


def shrinks(stores: Stores, file: str, ours: Settings, others: Sequence[Settings]) -> Finding:
    """The lead over the other, tuned, is greater in the smaller network."""
    small, large = (
        fmean(reached(stores, of, **ours).values()) - fmean(reached(stores, of, **others[0]).values())
        for of in ("cifar10-trials", file)
    )
    return Finding(large < small, f"{small:+.2f} and {large:+.2f} points over plain SGD")


# What a step does, and costs.
def own_gain(stores: Stores, file: str, ours: Settings, others: Sequence[Settings]) -> Finding:
    """Every row's own gain is above 1 in the plain layer; it is 1, or 2, in the forms that cancel it."""
    subjects = stores[file].read()[-1]["subjects"]
    names = [each["method"] for each in (ours, *others)]
    gains = [(name, layer["gain"]) for name in names for layer in subjects[name]["start"]["layers"]]
    if not others:
        figure = " and ".join(f"{low:.2f} to {high:.2f}" for _, (low, _, high) in gains)
        return Finding(all(low > 1 for _, (low, *_) in gains), f"own gain {figure} (quartiles, by layer)")
    wanted = {"norm-like": 2.0}
    off = max(abs(end / wanted.get(name, 1.0) - 1) for name, (low, _, high) in gains for end in (low, high))
    return Finding(off < 1e-4, f"own gain 1, 2 with norm-like layers at η; largest deviation {off:.0e}")


def needs_no_jacobians(stores: Stores, *_: object) -> Finding:
    """What a corrected layer costs without Jacobians, and what whole steps cost without and with them."""

    def times(pattern: str) -> str:
        ratios = [ratio["median"] for ratio in timings(stores, "layers", pattern).values()]
        return f"{min(ratios):.3g} to {max(ratios):.3g}"

    linear, steps = times("Linear.*Proportional$"), times("step.*GradientOnly$")
    figure = f"{linear} times the plain linear layer, whole steps of small networks {steps} times, by Jacobians "
    return Finding(False, figure + times("backward$"))


def thesis(stores: Stores, file: str, *_: object) -> Finding:
    """Accuracy of tuned runs has a positive rank correlation with the cosine, and a negative one with the spread."""
    members = mechanism.groups(stores[file].read())["all"]
    ranks = [mechanism.rank(members, quantity) for quantity in ("cosine", "gain_spread")]
    cosine, spread = (rank.statistic for rank in ranks)
    figure = f"rank correlation of accuracy with the cosine {cosine:+.2f}, with the own gain's spread {spread:+.2f}"
    finding = significant(cosine > 0, max(rank.pvalue for rank in ranks), figure, len(members))
    return finding._replace(holds=None) if cosine * spread > 0 else finding  # one speaks for it and one against


# Unit consistency.
def same_path(stores: Stores, file: str, ours: Settings, others: Sequence[Settings]) -> Finding:
    """A method's accuracies over gauges of σ = 2 lie within two points."""
    gauges, plain = (runs(stores, file, **each, rescaled=2.0)[0]["test_accuracy"][-1] for each in (ours, *others))
    ends = f"{min(gauges):.2f} to {max(gauges):.2f}"
    figure = f"{ours['optimizer']}: {ends} over gauges of σ = 2, plain {min(plain):.2f} to {max(plain):.2f}"
    return Finding(max(gauges) - min(gauges) < 2, figure, str(len(gauges)))


def loses_less(stores: Stores, file: str, ours: Settings, others: Sequence[Settings], along: str) -> Finding:
    """They lose less than the other from their easiest place to the hardest.

    The hardest place is that of the other's lowest accuracy, where one of the two learns something.
    """
    means = []
    for each in (*others, ours):
        by_place = cells(runs(stores, file, **each), along)
        places = [at for methods in by_place.values() for at in methods[each["method"]].values()]
        means.append([max(_by_epoch(r)[-1] for r in at) for at in places])
    learned = [pair for pair in zip(*means, strict=True) if max(pair) > 11]  # guessing one of ten classes has 10 %
    their_fall, our_fall = (max(accuracies) - at for accuracies, at in zip(means, min(learned), strict=True))
    rival = METHODS[others[0]["method"]].label
    return Finding(our_fall < their_fall - 1, f"falls by {our_fall:.1f} points, {rival} by {their_fall:.1f}")


# Isometry.
def gap(stores: Stores, file: str, ours: Settings, others: Sequence[Settings], how: str) -> Finding:
    """Quartiles over draws behind the last layer are level, or those of ours are below; they may be out of range."""
    result, activation = stores[file].read()[-1], ours["activation"]
    gaps, rival = (
        result["activations"][activation][each.get("quantity", "measured")][each["variant"]][result["depth"]]
        for each in (ours, *others)
    )
    words = ["out of range" if each is None else f"{each[1]:.2g}" for each in (gaps, rival)]
    figure, n = f"{activation} {words[0]} against {words[1]}", f"{result['seeds']} draws"
    if gaps is None or rival is None:
        return Finding(how == "below" and rival is None and gaps is not None, figure, n)
    overlap = gaps[0] <= rival[2] and rival[0] <= gaps[2]
    return Finding(overlap if how == "level" else None if overlap else gaps[1] < rival[1], figure, n)


def bounded(stores: Stores, file: str, *_: object) -> Finding:
    """The gap at infinite width lies below its bound at every depth."""
    activations = stores[file].read()[-1]["activations"]
    pairs = [pair for each in activations.values() for pair in zip(each["mean_field"], each["bound"], strict=True)]
    return Finding(all(gap <= bound for gap, bound in pairs), f"{len(activations)} activations, every depth")


def never_lowered(stores: Stores, file: str, *_: object) -> Finding:
    """No norm of any network lowers isometry."""
    networks = isometry_training.by_depth(stores[file].read())[10]
    stages = "start", "trained"
    least = {name: min(min(isometry_training.least_gains(s, at)) for at in stages) for name, s in networks.items()}
    lowered = {name: change for name, change in least.items() if change < 0}
    figure = f"lowered with {', '.join(f'{name} ({change:.0e})' for name, change in lowered.items()) or 'none'}"
    return Finding(not lowered, f"{figure} of {len(networks)} activations", str(sum(map(len, networks.values()))))


def faster(stores: Stores, file: str, _: Settings, __: object, layers: str, no: str = "") -> Finding:
    """The training loss falls with β over activations; or does not, if that is what is claimed."""
    networks = isometry_training.by_depth(stores[file].read())[int(layers)]
    rank = isometry_training.correlation(networks)
    figure = f"rank correlation of β with the training loss {rank.statistic:+.2f}, {layers} layers"
    return significant((rank.statistic < 0) is not bool(no), rank.pvalue, figure, len(networks))


def same_at_widths(stores: Stores, file: str, *_: object) -> Finding:
    """The gap behind the last norm is the same within a tenth."""
    last = sorted(-math.log(r["isometry"]["start"][-1]["isometry"]) for r in stores[file].read())
    return Finding(last[-1] < 1.1 * last[0], f"gap {last[0]:.2f} to {last[-1]:.2f} behind five layers", "4 networks")
