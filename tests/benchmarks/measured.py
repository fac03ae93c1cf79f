"""Numbers that pages quote, read from the committed results."""

import math
from functools import cache
from statistics import fmean, median

from scipy.stats import ttest_ind

from benchmarks.core.store import Store
from benchmarks.core.table import spearman
from benchmarks.digests import papers
from benchmarks.digests.judges import reached
from benchmarks.studies import isometry_training, mechanism, table1
from benchmarks.studies import tuned as tunes

from .test_report import RESULTS

IDEAL, AFFINE, NONE, BATCHNORM, WHITE = "batch-ideal", "affine-like", "none", "batchnorm", "whitened-16"


@cache
def results(file, part=None):
    return Store(RESULTS / f"{file}.jsonl").read(part)


class Read:
    """A file of results that is read once."""

    def __init__(self, file):
        self.file = file

    def read(self, part=None):
        return results(self.file, part)


STORES = {path.stem: Read(path.stem) for path in RESULTS.glob("*.jsonl")}


def seeds(file, **wanted):
    return reached(file, **wanted)(STORES)


def acc(file, **wanted):
    return fmean(seeds(file, **wanted))


def lead(file, own, other, **common):
    return acc(file, **common, **own) - acc(file, **common, **other)


def in_paper_order(activation, file="table1-reduced"):
    """Spearman's ρ with the paper's means, and its p."""
    rank, _ = table1.ranked(results(file), activation)
    return rank.statistic, rank.pvalue


def p(ours, theirs):
    return ttest_ind(ours, theirs, equal_var=False).pvalue


def tuned(method, optimizer="sgd", file="cifar10-trials", epochs=15):
    return acc(file, method=method, optimizer=optimizer, epochs=epochs)


def departed(departure, method=AFFINE, file="departures"):
    """Accuracy where something that the paper leaves open is read otherwise, less the tables' own; and p."""
    own, base = (
        next(r for r in results(file)
             if (r["settings"]["method"], r["settings"].get("departure")) == (method, d))["test_accuracy"][-1]
        for d in (departure, None)
    )  # fmt: skip
    return fmean(own) - fmean(base), p(own, base)


def best_epoch(method=AFFINE):
    """What the best epoch of Table 1's largest batch has above the last, tanh."""
    return best_at_length(method)[1] - fmean(at_length(method)[-1])


def best_at_length(method, activation="tanh"):
    """Of Table 1's largest batch the epoch after which accuracy was best, and how good it was."""
    return max(enumerate(map(fmean, at_length(method, activation)), start=1), key=lambda found: found[1])


def at_length(method, activation="tanh", of="test_accuracy"):
    """Of Table 1's largest batch all seeds by epoch."""
    wanted = {"method": method, "activation": activation, "batch_size": 128}
    return next(r for r in results("table1") if wanted.items() <= r["settings"].items())[of]


def long(method, optimizer="sgd"):
    return tuned(method, optimizer, "cifar10-long", 40)


def rate(batch, method, lr=None):
    """Accuracy at a rate, or at the best of all."""
    found = {r["settings"]["lr"]: fmean(r["test_accuracy"][-1]) for r in results("rates")
             if (r["settings"]["method"], r["settings"]["batch_size"]) == (method, batch)}  # fmt: skip
    return max(found.values()) if lr is None else found[lr]


def below(*rates):
    """How far BatchIdeal ends below its best at worst, over batch sizes."""
    own = "batch-ideal-default"
    return max(rate(size, own) - rate(size, own, lr) for size in (8, 32, 128) for lr in rates)


def cosine(name, stage):
    (found,) = results("divergence")
    layers = [layer["cosine"][1] for layer in found["subjects"][name][stage]["layers"]]
    return min(layers), max(layers)


def speed(suite, *parts, of="time_ratio"):
    """Medians of the rows whose names have all parts, least and greatest."""
    (found,) = (r for r in results("speed") if r["key"] == suite)
    rows = [row for row in found["rows"] if all(part in row["what"] for part in parts)]
    values = [row[of]["median"] if of == "time_ratio" else row[of] for row in rows]
    return min(values), max(values)


def whitened_steps(batch, *variants):
    """What training steps take, whitened in each of these ways: AdamW's, Muon's."""
    (found,) = (r for r in results("speed") if r["key"] == "whitened")
    medians = {row["what"]: row["time_ratio"]["median"] for row in found["rows"]}
    return [medians[f"{o}, batch {batch}, every 10{each}"] for each in variants for o in ("AdamW", "Muon")]


def at_all_sizes(method, activation):
    """Every seed's mean over the paper's batch sizes after 100 epochs."""
    return table1.over_sizes(table1.series(results("table1"))[method, activation])


def over_all_sizes(method, activation):
    """Their mean, and by how much the paper's is above it."""
    mean = fmean(at_all_sizes(method, activation))
    return mean, table1.PAPER[method, activation][0] - mean


def below_none(method, activation):
    """By how much a method's mean is below that without a normaliser; p."""
    own, plain = (at_all_sizes(m, activation) for m in (method, NONE))
    return fmean(plain) - fmean(own), p(own, plain)


def ranked_at_length(activation, without=""):
    """Spearman's ρ of these means with the paper's, and p."""
    methods = [m for m, a in table1.PAPER if a == activation and m != without]
    return spearman(
        [fmean(at_all_sizes(m, activation)) for m in methods], [table1.PAPER[m, activation][0] for m in methods]
    )


def tuned_cnn(method, optimizer="adam"):
    """With pooling, rates and damping tuned."""
    return seeds("cnn-pool-tuned", method=method, optimizer=optimizer)


def mlp(method, optimizer):
    """With tanh, rates and dampings tuned."""
    return seeds("mlp-tuned", method=method, optimizer=optimizer, activation="tanh")


def other_pairs():
    """How many pairs of a method and an optimizer the MLP has beside batch-ideal's: equal ones count once."""
    pairs = {(r["settings"]["method"], r["settings"]["optimizer"]) for r in results("mlp-tuned")}
    return len({tuple(mlp(*pair)) for pair in pairs if pair[0] != IDEAL})


def gains(method, *optimizers):
    """What a method gains over no normaliser with these optimizers, or all four, the least first; the highest p."""
    pairs = [(mlp(method, o), mlp(NONE, o)) for o in optimizers or tunes.ALL_HAVE]
    return sorted(fmean(own) - fmean(plain) for own, plain in pairs), max(p(*pair) for pair in pairs)


def losses_of(method):
    """The range of what a method loses against no normaliser, with all four optimizers."""
    (least, *_, most), _ = gains(method)
    return [-most, -least]


def trials_of(method, optimizer):
    """How many of these chose rate and damping."""
    wanted = {"method": method, "optimizer": optimizer}
    return sum(wanted.items() <= r["settings"].items() for r in results("cnn-pool-tuned", "search"))


def gap(activation, variant, quantity="measured"):
    return papers.depth_quartiles(STORES, activation, variant, quantity)[1]


def widths(at):
    return -math.log(
        next(r for r in results("isometry-widths") if r["widths"][0] == 8192)["isometry"]["start"][at]["isometry"]
    )


def beta(end):
    return isometry_training.correlations(isometry_training.by_depth(results("isometry-training"))[10])[end]


def ranked(quantity, file="mechanism", without=None):
    """Rank correlation of a quantity with the accuracy over all runs that were followed, but a method's; p."""
    members = [r for r in results(file) if r["settings"]["method"] != without]
    found = mechanism.rank(mechanism.groups(members)["all"], quantity)
    return found.statistic, found.pvalue


def followed(method, quantity):
    return [mechanism.means(r)[quantity] for r in results("mechanism") if r["settings"]["method"] == method]


def over_gauges(method, optimizer):
    """The span of accuracies in all gauges."""
    every = [accuracy for sigma in (0.0, 0.5, 1.0, 2.0) for accuracy in gauges(method, optimizer, sigma)]
    return max(every) - min(every)


def above_plain(method):
    """By how much plain Adam ends above a gauge in rescaled networks, least and most."""
    found = [fmean(gauges(NONE, "adam", s)) - fmean(gauges(method, "adam", s)) for s in (0.5, 1.0, 2.0)]
    return min(found), max(found)


def at_32(activation):
    """By how much batch-ideal ends below affine-like layers after 100 epochs, batch 32; p."""
    own, other = (
        next(r["test_accuracy"][-1] for r in results("table1")
             if {"method": m, "activation": activation, "batch_size": 32}.items() <= r["settings"].items())
        for m in (IDEAL, AFFINE)
    )  # fmt: skip
    return fmean(other) - fmean(own), p(own, other)


def gauges(method, optimizer, sigma):
    return seeds("uc-rescaled", method=method, optimizer=optimizer, rescaled=sigma)


def swept(method, optimizer, **more):
    return acc("uc-sweep", method=method, optimizer=optimizer, **more)


def cnn(method, file="cnn"):
    return acc(file, method=method)


def ahead(one, other):
    return [cnn(one, file) - cnn(other, file) for file in ("cnn", "cnn-pool")]


def plus(numbers, signs):
    """Numbers as distances, which have to have these signs."""
    assert [number > 0 for number in numbers] == [sign == "+" for sign in signs], numbers
    return [abs(number) for number in numbers]


def cnn_price(method):
    """The highest of the times of a method's step in the two networks of convolutions, in those of no method."""
    return max(
        median(one["seconds"]) / median(other["seconds"])
        for study in ("cnn", "cnn-pool")
        for one, other in [[r for m in (method, NONE) for r in results(study) if r["settings"]["method"] == m]]
    )


def ideal_steps():
    """Whole steps of SGD with BatchIdeal in a plain loop, in those of SGD: the paper's network, and that of digits."""
    what = "training step {}, batch 32, SGD, GradientOnly with BatchIdeal"
    return [speed("layers", what.format(sizes))[0] for sizes in ([3072, 32, 32, 10], [64, 32, 32, 10])]
