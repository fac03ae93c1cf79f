"""The tables of calls and settings say what the committed results say, by scipy's intervals."""

import math
from statistics import fmean

import pytest
from scipy import stats

from benchmarks.digests.calls import CALLS, from_this_library
from benchmarks.methods import METHODS

from .conftest import STORES


def solutions(optimizer, method, seconds):
    """Errors by seed, of runs without a normaliser."""
    wanted = {"norm": "none", "optimizer": optimizer, "method": method, "rows": None}
    wanted |= {"equation": "poisson", "points": "fixed", "seconds": seconds}
    runs = [r for r in STORES["poisson"].read() if all(r["settings"].get(k) == v for k, v in wanted.items())]
    return {r["settings"]["seed"]: r["error"][-1] for r in runs}


def tuned_cnn(method):
    wanted = {"method": method, "optimizer": "adam"}.items()
    (run,) = (r for r in STORES["cnn-pool-tuned"].read() if wanted <= r["settings"].items())
    return run["test_accuracy"][-1]


@pytest.fixture(scope="module")
def found():
    return {call.task: call.evidence(STORES) for call in CALLS}


def test_gain_of_an_equation_is_a_factor_with_the_interval_of_the_paired_test(found):
    own, bare = (solutions("soap", how, seconds=60.0) for how in ("whitened", "none"))
    test = stats.ttest_rel([math.log10(own[key]) for key in own], [math.log10(bare[key]) for key in own])
    gain = found["Poisson's equation, a minute, SOAP"].gain
    factor = math.prod(own[key] / bare[key] for key in own) ** (1 / len(own))
    wanted = [factor, *(10**end for end in test.confidence_interval(0.95))]
    assert [gain.numbers[name] for name in ("", "low", "high")] == pytest.approx(wanted)
    assert gain.text.startswith(f"× {factor:.2g} [")


def test_gain_of_a_classifier_is_that_of_welchs_test_and_the_rival_the_best_without_this_library(found):
    evidence = found["CNN without a normaliser, Adam"]
    test = stats.ttest_ind(tuned_cnn("whitened-16"), tuned_cnn("none"), equal_var=False)
    assert [evidence.gain.numbers[end] for end in ("low", "high")] == pytest.approx(test.confidence_interval(0.95))
    others = {
        (r["settings"]["method"], r["settings"]["optimizer"]): fmean(r["test_accuracy"][-1])
        for r in STORES["cnn-pool-tuned"].read()
        if not from_this_library(r["settings"]["method"])
    }
    method, optimizer = max(others, key=others.get)
    assert evidence.rival.numbers[""] == f"{METHODS[method].label}, {optimizer.title()}"
    assert evidence.rival.numbers["difference"] == pytest.approx(fmean(tuned_cnn("whitened-16")) - max(others.values()))
