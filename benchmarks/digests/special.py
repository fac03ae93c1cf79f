"""Judges of the claims that no comparison of two samples fits: each reads its own numbers from a file of results."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from ..core.store import setting
from ..core.tables import grouped
from ..methods import METHODS
from ..studies import isometry_training, mechanism
from ..studies.papers import cells
from .judges import TABLE1, Claim, Finding, lead, significant
from .reached import ACCURACY, Stores, reached, runs, timings, values

Judge = Callable[[Stores, Claim], Finding]


def whole(judge: Judge) -> Judge:
    """A judge of runs of a hundred epochs, as in the paper's figures; those of shorter runs are undecided."""

    def judged(stores: Stores, claim: Claim) -> Finding:
        finding, ran = judge(stores, claim), max(r["settings"]["epochs"] for r in runs(stores, claim.file))
        return finding if ran >= 100 else finding._replace(holds=None, word=f"{ran} of 100 epochs")

    return judged


# Images.
def along(
    stores: Stores, claim: Claim, *, keep: Callable[[str, float], bool] = lambda panel, place: True
) -> Finding:  # fmt: skip
    """Own is better than the best of the others at every place of a sweep that counts; at least one has to."""
    wanted = {key: value for key, value in claim.own.items() if key != "method"}
    name, *names = (each["method"] for each in (claim.own, *claim.others))
    verdicts = [
        lead(values(at[name][place]), {other: values(at[other][place]) for other in names}, ACCURACY).holds
        for panel, at in cells(runs(stores, claim.file, **wanted), "width").items()
        for place in at.get(name, ())
        if keep(panel, place)
    ]  # fmt: skip
    if not verdicts:
        raise LookupError(f"{claim.file}: no width or depth of those that the claim is about.")
    won, lost = verdicts.count(True), verdicts.count(False)
    figure = f"ahead at {won} of {len(verdicts)} widths and depths, behind at {lost}"
    return Finding(True if won == len(verdicts) else False if lost else None, figure)


def overtakes(stores: Stores, claim: Claim) -> Finding:
    """Own passes the other, which learns faster, at about the twentieth epoch."""
    ours, theirs = (runs(stores, TABLE1, **each)[0]["test_accuracy"] for each in (claim.own, *claim.others))
    means = zip(map(statistics.fmean, ours), map(statistics.fmean, theirs), strict=True)
    last = max((epoch for epoch, (own, other) in enumerate(means, start=1) if other > own), default=0)
    return Finding(10 <= last <= 30, f"behind until epoch {last} of {len(theirs)}", str(len(theirs[0])))


def drop(stores: Stores, claim: Claim, *, of: Sequence[str]) -> Finding:
    """From their best epoch to the last some methods lose more than any other one, at every batch size there is."""
    methods = [*of, *(other["method"] for other in claim.others)]
    lost: dict[int, dict[str, float]] = {}
    for result in runs(stores, TABLE1, **claim.own, method=set(methods)):
        means = [statistics.fmean(seeds) for seeds in result["test_accuracy"]]
        lost.setdefault(result["settings"]["batch_size"], {})[result["settings"]["method"]] = max(means) - means[-1]
    pairs = [
        ([by_method[name] for name in of], [by_method[name] for name in methods if name not in of])
        for by_method in lost.values() if len(by_method) == len(methods)
    ]  # fmt: skip
    if not pairs:
        raise LookupError(f"{TABLE1} has not every method at any batch size, {claim.own}.")
    ours, others = ([each for pair in pairs for each in pair[side]] for side in (0, 1))
    figure = f"lose {min(ours):.1f} to {max(ours):.1f} points, others {min(others):.1f} to {max(others):.1f}"
    return Finding(all(min(a) > max(b) for a, b in pairs), figure, f"{len(pairs)} batch sizes")


def flat_rates(stores: Stores, claim: Claim) -> Finding:
    """At rates from 0.3 to 3 a method ends within two points of its best, over all batch sizes."""
    by_size = grouped(runs(stores, claim.file, **claim.own), setting("batch_size"))
    means = [{r["settings"]["lr"]: statistics.fmean(r["test_accuracy"][-1]) for r in rs} for rs in by_size.values()]
    worst = max(max(at.values()) - min(at[lr] for lr in (0.3, 1.0, 3.0)) for at in means)
    sizes = ", ".join(map(str, sorted(by_size)))
    return Finding(worst < 2, f"at most {worst:.1f} points below its best from 0.3 to 3, batches of {sizes}")


def shrinks(stores: Stores, claim: Claim) -> Finding:
    """The lead over the other, tuned, is greater in the smaller network."""
    leads = []
    for file in ("cifar10-trials", claim.file):
        ours, theirs = (reached(stores, file, **each) for each in (claim.own, *claim.others))
        leads.append(statistics.fmean(ours.values()) - statistics.fmean(theirs.values()))
    return Finding(leads[1] < leads[0], f"{leads[0]:+.2f} and {leads[1]:+.2f} points over plain SGD")


# What a step does, and costs.
def own_gain(stores: Stores, claim: Claim) -> Finding:
    """Every row's own gain is above 1 in the plain layer; it is 1, or 2, in the forms that cancel it."""
    subjects = stores["divergence"].read()[-1]["subjects"]
    gains = {
        each["method"]: [(layer["gain"][0], layer["gain"][2]) for layer in subjects[each["method"]]["start"]["layers"]]
        for each in (claim.own, *claim.others)
    }
    if not claim.others:
        (layers,) = gains.values()
        figure = " and ".join(f"{low:.2f} to {high:.2f}" for low, high in layers)
        return Finding(all(low > 1 for low, _ in layers), f"own gain {figure} (quartiles, by layer)")
    wanted = {name: 2.0 if name == "norm-like" else 1.0 for name in gains}
    off = max(abs(end / wanted[name] - 1) for name, layers in gains.items() for layer in layers for end in layer)
    return Finding(off < 1e-4, f"own gain 1, 2 with norm-like layers at η; largest deviation {off:.0e}")


def needs_no_jacobians(stores: Stores, claim: Claim) -> Finding:
    """What a corrected layer costs without Jacobians, and what whole steps cost without and with them."""

    def times(pattern: str) -> str:
        ratios = [row["time_ratio"]["median"] for row in timings(stores, "layers", pattern).values()]
        return f"{min(ratios):.3g} to {max(ratios):.3g}"

    linear, steps = times("Linear.*Proportional$"), times("step.*GradientOnly$")
    figure = f"{linear} times the plain linear layer, whole steps of small networks {steps} times, by Jacobians "
    return Finding(False, figure + times("backward$"))


def thesis(stores: Stores, claim: Claim) -> Finding:
    """Cosine and accuracy of tuned runs have a positive rank correlation."""
    members = mechanism.groups(stores["mechanism"].read())["all"]
    rank = mechanism.rank(members, "cosine")
    figure = f"rank correlation of cosine and accuracy {rank.statistic:+.2f}"
    return significant(rank.statistic > 0, rank.pvalue, figure, len(members))


# Unit consistency.
def same_path(stores: Stores, claim: Claim) -> Finding:
    """A method's accuracies over gauges of σ = 2 lie within two points."""
    ours, plain = (
        runs(stores, claim.file, **each, rescaled=2.0)[0]["test_accuracy"][-1] for each in (claim.own, *claim.others)
    )
    ends = f"{min(ours):.2f} to {max(ours):.2f}"
    figure = f"{claim.own['optimizer']}: {ends} over gauges of σ = 2, plain {min(plain):.2f} to {max(plain):.2f}"
    return Finding(max(ours) - min(ours) < 2, figure, str(len(ours)))


#: Accuracy of guessing one of ten classes, %.
CHANCE = 10.0


def loses_less(stores: Stores, claim: Claim, *, along: str) -> Finding:
    """Own loses less than the other from its easiest place to the hardest.

    The hardest place is that of the other's lowest accuracy, where one of the two learns something.
    """
    means = []
    for each in (*claim.others, claim.own):
        by_place = cells(runs(stores, claim.file, **each), along)
        places = [at for methods in by_place.values() for at in methods[each["method"]].values()]
        means.append([max(statistics.fmean(r["test_accuracy"][-1]) for r in at) for at in places])
    learned = [pair for pair in zip(*means, strict=True) if max(pair) > CHANCE + 1]
    theirs, ours = (max(accuracies) - at for accuracies, at in zip(means, min(learned), strict=True))
    rival = METHODS[claim.others[0]["method"]].label
    return Finding(ours < theirs - 1, f"falls by {ours:.1f} points, {rival} by {theirs:.1f}")


# Isometry.
def gap(stores: Stores, claim: Claim, *, is_level: bool) -> Finding:
    """Quartiles over draws behind the last layer overlap, or own lie below the other's; they may be out of range."""
    result, activation = stores["isometry-depth"].read()[-1], claim.own["activation"]
    ours, theirs = (
        result["activations"][activation][each.get("quantity", "measured")][each["variant"]][result["depth"]]
        for each in (claim.own, *claim.others)
    )
    words = ["out of range" if each is None else f"{each[1]:.2g}" for each in (ours, theirs)]
    figure, n = f"{activation} {words[0]} against {words[1]}", f"{result['seeds']} draws"
    if ours is None or theirs is None:
        return Finding(not is_level and theirs is None and ours is not None, figure, n)
    overlap = ours[0] <= theirs[2] and theirs[0] <= ours[2]
    return Finding(overlap if is_level else None if overlap else ours[1] < theirs[1], figure, n)


overlap, below = (partial(gap, is_level=is_level) for is_level in (True, False))


def bounded(stores: Stores, claim: Claim) -> Finding:
    """The gap at infinite width lies below its bound at every depth."""
    activations = stores["isometry-depth"].read()[-1]["activations"]
    pairs = [pair for each in activations.values() for pair in zip(each["mean_field"], each["bound"], strict=True)]
    return Finding(all(gap <= bound for gap, bound in pairs), f"{len(activations)} activations, every depth")


def never_lowered(stores: Stores, claim: Claim) -> Finding:
    """No norm of any network lowers isometry."""
    networks = isometry_training.by_depth(stores["isometry-training"].read())[10]
    stages = "start", "trained"
    least = {name: min(min(isometry_training.least_gains(s, at)) for at in stages) for name, s in networks.items()}
    lowered = {name: change for name, change in least.items() if change < 0}
    figure = f"lowered with {', '.join(f'{name} ({change:.0e})' for name, change in lowered.items()) or 'none'}"
    return Finding(not lowered, f"{figure} of {len(networks)} activations", str(sum(map(len, networks.values()))))


def faster(stores: Stores, claim: Claim, *, layers: int, wanted: bool) -> Finding:
    """The training loss falls with β over activations; or does not, if that is what is claimed."""
    networks = isometry_training.by_depth(stores["isometry-training"].read())[layers]
    rank = isometry_training.correlation(networks)
    figure = f"rank correlation of β with the training loss {rank.statistic:+.2f}, {layers} layers"
    return significant((rank.statistic < 0) is wanted, rank.pvalue, figure, len(networks))


def same_at_widths(stores: Stores, claim: Claim) -> Finding:
    """The gap behind the last norm is the same within a tenth."""
    last = sorted(-math.log(r["isometry"]["start"][-1]["isometry"]) for r in stores["isometry-widths"].read())
    return Finding(last[-1] < 1.1 * last[0], f"gap {last[0]:.2f} to {last[-1]:.2f} behind five layers", "4 networks")
