"""Numbers that pages quote, read from the committed results."""

from statistics import fmean

from scipy.stats import ttest_ind

from benchmarks.core.store import Store
from benchmarks.core.tables import spearman
from benchmarks.digests.judges import reached
from benchmarks.studies import table1

from .test_report import RESULTS

IDEAL, AFFINE, NONE, BATCHNORM, WHITE = "batch-ideal", "affine-like", "none", "batchnorm", "whitened-16"


STORES = {path.stem: Store(path) for path in RESULTS.glob("*.jsonl")}


def results(file):
    return STORES[file].read()


def seeds(file, **wanted):
    return reached(file, **wanted)(STORES)


def p(ours, theirs):
    return ttest_ind(ours, theirs, equal_var=False).pvalue


def speed(suite, *parts, of="time_ratio"):
    """Medians of the rows whose names have all parts, least and greatest."""
    (found,) = (r for r in results("speed") if r["key"] == suite)
    rows = [row for row in found["rows"] if all(part in row["what"] for part in parts)]
    values = [row[of]["median"] if of == "time_ratio" else row[of] for row in rows]
    return min(values), max(values)


def measurements():
    """What one `divergence` takes, in training steps: the least and the most but of affine-like layers."""
    rows = {row["what"]: row["time_ratio"]["median"] for (found,) in [results("divergence")] for row in found["cost"]}
    others = [ratio for name, ratio in rows.items() if name != AFFINE]
    return min(others), max(others)


def ranked_at_length(activation):
    """The same after 100 epochs, of the means over the batch sizes."""
    methods, found = [m for m, a in table1.PAPER if a == activation], table1.series(results("table1"))
    means = [fmean(table1.over_sizes(found[m, activation])) for m in methods]
    return spearman(means, [table1.PAPER[m, activation][0] for m in methods])


def tuned_cnn(method, optimizer="adam"):
    """With pooling, rates and damping tuned."""
    return seeds("cnn-pool-tuned", method=method, optimizer=optimizer)


def trials(method, optimizer="adam", file="cnn-pool-tuned", **wanted):
    """How many chose them."""
    tried = [r["settings"] for r in STORES[file].read("search")]
    own = {"method": method, "optimizer": optimizer, **wanted}
    return sum(own.items() <= {name: s.get(name) for name in own}.items() for s in tried)


def mlp(method, optimizer):
    """With tanh, rates and dampings tuned."""
    return seeds("mlp-tuned", method=method, optimizer=optimizer, activation="tanh")


def lead(file, method, rival, **wanted):
    """How many points a method is ahead of another one, and p."""
    own, other = (seeds(file, method=name, **wanted) for name in (method, rival))
    return fmean(own) - fmean(other), p(own, other)


def at_32():
    """By how much batch-ideal ends below affine-like layers after 100 epochs with tanh, batch 32."""
    own, other = (seeds("table1", method=m, activation="tanh", batch_size=32) for m in (IDEAL, AFFINE))
    return [fmean(other) - fmean(own)]


def _norm_free(file, norm, drawn, method, of="test_loss", embedding_lr=None):
    wanted = {"norm": norm, "embedding_deviation": drawn, "embedding_lr": embedding_lr}
    return reached(file, method, of=of, **wanted)(STORES)


def freed(method, twin, norm="none", drawn=1.0, file="norm-free", embedding_lr=None, twins=None, of="test_loss"):
    """Losses without a normaliser, and those with LayerNorm."""
    arms = (norm, drawn, method, embedding_lr), ("layernorm", None, twin, twins)
    return [_norm_free(file, n, d, m, of, e) for n, d, m, e in arms]


def free(*arms, **options):
    """The difference of the two, and its p: validation, test."""
    pairs = [freed(*arms, of=of, **options) for of in ("validation_loss", "test_loss")]
    return [(fmean(own) - fmean(other), p(own, other)) for own, other in pairs]


def interval(ours, theirs):
    """Where the difference lies, with 95 %."""
    return ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)


def above_held(method):
    """By how much a method ends above `InputScaled(hold=True)` with Muon, both without a normaliser, on test; and p."""
    own, held = (_norm_free("norm-free", "none", 1.0, name) for name in (method, "input-held-muon"))
    return fmean(own) - fmean(held), p(own, held)


def longer(norm="none", embedding_lr=3e-2):
    """The same after 2,000 steps, behind Muon and held, with this rate for the embeddings; LayerNorm's is the best."""
    return free("input-held-muon", "muon", norm, file="norm-free-2000", embedding_lr=embedding_lr, twins=3e-2)
