"""Numbers of the language model that pages quote, read from the committed results."""

from functools import cache
from itertools import product
from statistics import fmean

from scipy.stats import ttest_rel

from benchmarks.digests import judges
from benchmarks.studies.language import best_rows

from .measured import STORES, p, results


@cache
def rows(file):
    return best_rows(results(file))


def losses(norm, method, of="validation_loss", file="char-lm"):
    return [r[of][-1] if of == "validation_loss" else r[of] for r in rows(file)[norm, method]]


def less(one, other, norm="layernorm", file="char-lm", norms=None, by=fmean):
    """How much lower the losses of one method are than those of another: validation, test."""
    own, twin = norms or (norm, norm)
    return [
        by(losses(twin, other, of, file)) - by(losses(own, one, of, file)) for of in ("validation_loss", "test_loss")
    ]


def by_some_rows(optimizer, count):
    """How much higher the test loss is if so many rows count, and p."""
    some, every = (
        losses("layernorm", f"whitened-{optimizer}{rows}", "test_loss", "char-lm-rows")
        for rows in (f"-{count}-rows", "")
    )
    return fmean(some) - fmean(every), p(some, every)


def _norm_free(file, norm, drawn, method, of="test_loss", embedding_lr=None):
    wanted = {"norm": norm, "embedding_deviation": drawn, "embedding_lr": embedding_lr}
    return judges.reached(file, method, of=of, **wanted)(STORES)


def free(method, twin, norm="none", drawn=1.0, file="norm-free", embedding_lr=None, twins=None):
    """Without a normaliser against LayerNorm: validation, test."""
    found = []
    for of in ("validation_loss", "test_loss"):
        own, other = (
            _norm_free(file, n, d, m, of, e)
            for n, d, m, e in ((norm, drawn, method, embedding_lr), ("layernorm", None, twin, twins))
        )
        found.append((fmean(own) - fmean(other), p(own, other)))
    return found


def unnormalised(drawn, method="muon"):
    """Test loss without a normaliser."""
    return fmean(_norm_free("norm-free", "none", drawn, method, "test_loss", None))


def beside(method, norm, drawn):
    """A wrapper of steps against the optimizer alone, in the same network, on validation."""
    own, other = (
        _norm_free("norm-free", norm, drawn, m, "validation_loss", None) for m in (method, method.rpartition("-")[2])
    )
    return fmean(own) - fmean(other), p(own, other)


def beside_all(optimizer, *norms, drawn=(None, 1.0)):
    """The same for both wrappers and all of these networks: the largest difference, and the least p."""
    methods = [f"input-{how}-{optimizer}" for how in ("scaled", "held")]
    every = [beside(*row) for row in product(methods, norms, drawn)]
    return [max(abs(difference) for difference, _ in every), min(found for _, found in every)]


def beside_paired(drawn, *norms):
    """Of wrappers of Muon beside a normaliser, seed by seed: the least and largest difference, the largest p."""
    rows = product(("input-scaled-muon", "input-held-muon"), norms)
    pairs = [
        [_norm_free("norm-free", norm, drawn, m, "validation_loss", None) for m in (method, "muon")]
        for method, norm in rows
    ]
    found = [fmean(own) - fmean(other) for own, other in pairs]
    return min(found), max(found), max(ttest_rel(*pair).pvalue for pair in pairs)


def costs_adamw(how):
    """What a wrapper costs AdamW without a normaliser on test, embeddings of deviation 1; p."""
    pair = [_norm_free("norm-free", "none", 1.0, m, "test_loss", None) for m in (f"input-{how}-adamw", "adamw")]
    return fmean(pair[0]) - fmean(pair[1]), p(*pair)


def longer(best_twin=False):
    """The same after 2,000 steps, behind Muon and held; against LayerNorm with the same rates, or at its best."""
    return free("input-held-muon", "muon", file="norm-free-2000", twins=3e-2 if best_twin else None)


def faster(rate=3e-2):
    """With a rate for the embeddings of both."""
    return free("input-held-muon", "muon", file="norm-free-2000", embedding_lr=rate, twins=rate)


def one_norm(method="input-held-muon"):
    """With one LayerNorm, before the head, likewise."""
    return free(method, "muon", "head-layernorm", file="norm-free-2000", embedding_lr=3e-2, twins=3e-2)


def faster_twins(rate):
    """LayerNorm with a rate for the embeddings, against LayerNorm without."""
    both = [_norm_free("norm-free-2000", "layernorm", None, "muon", "validation_loss", e) for e in (rate, None)]
    return fmean(both[0]) - fmean(both[1]), p(*both)


def deep(method, other=("layernorm", 1.0, "muon")):
    """With twelve layers, without a normaliser, against LayerNorm with the same embeddings or another row."""
    found = []
    for of in ("validation_loss", "test_loss"):
        pair = [_norm_free("norm-free-deep", *row, of) for row in (("none", 1.0, method), other)]
        found.append((fmean(pair[0]) - fmean(pair[1]), p(*pair)))
    return found


def residual(norm, drawn, method, file="norm-free"):
    found = judges.runs(STORES, file, norm=norm, method=method)
    found = [r for r in found if r["settings"].get("embedding_deviation") == drawn]
    return max(fmean(r["rms"][at] for r in found) for at in range(len(found[0]["rms"]) - 1))


def at_equal_seconds(of):
    """Muon's 2,160 steps against 2,000 of whitened Muon: the difference and p."""
    found = equal(2160, of), losses("layernorm", "whitened-muon-16", of, "char-lm-2000")
    return fmean(found[0]) - fmean(found[1]), p(*found)


def equal(steps, of):
    found = [r for r in results("char-lm-equal-time") if r["settings"]["steps"] == steps]
    return [r[of][-1] if of == "validation_loss" else r[of] for r in found]
