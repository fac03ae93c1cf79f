"""The tables of calls and settings say what the committed results say, by scipy's intervals."""

import math
from statistics import fmean, median

import pytest
from scipy import stats

from benchmarks.core.arms import chosen, pace
from benchmarks.digests.calls import DIGESTS, from_this_library
from benchmarks.methods import METHODS

from .conftest import STORES

GAIN = [f"gain over the optimizer (95 %){end}" for end in ("", " low", " high")]
LEAD = "lead on the best without this library"


def solutions(optimizer, method):
    """Errors of Kovasznay's flow by seed, of the network whose median is lower."""
    wanted = {"equation": "kovasznay", "optimizer": optimizer, "method": method}.items()
    runs = chosen(r for r in STORES["equations"].read() if wanted <= r["settings"].items())
    widths = {r["settings"]["hidden"] for r in runs}
    assert len(widths) == 2
    networks = ({r["settings"]["seed"]: r["error"][-1] for r in runs if r["settings"]["hidden"] == w} for w in widths)
    return min(networks, key=lambda errors: median(errors.values()))


def tuned_cnn(method):
    wanted = {"method": method, "optimizer": "adam"}.items()
    (run,) = (r for r in STORES["cnn-pool-tuned"].read() if wanted <= r["settings"].items())
    return run["test_accuracy"][-1]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The table of calls, by task."""
    (table,) = DIGESTS["calls"].section(STORES, "calls", tmp_path_factory.mktemp("figures")).tables
    return table.frame.set_index(table.header[0])


def test_gain_of_an_equation_is_a_factor_with_the_interval_of_the_paired_test(found):
    own, bare = (solutions("soap", how) for how in ("whitened", "none"))
    test = stats.ttest_rel([math.log10(own[key]) for key in own], [math.log10(bare[key]) for key in own])
    factor = math.prod(own[key] / bare[key] for key in own) ** (1 / len(own))
    wanted = [factor, *(10**end for end in test.confidence_interval(0.95))]
    assert [*found.loc["Kovasznay's flow, a minute, SOAP", GAIN]] == pytest.approx(wanted)


def test_gain_of_a_classifier_is_that_of_welchs_test_and_the_rival_the_best_without_this_library(found):
    row = found.loc["CNN without a normaliser, Adam"]
    test = stats.ttest_ind(tuned_cnn("whitened-16"), tuned_cnn("none"), equal_var=False)
    assert [*row[GAIN[1:]]] == pytest.approx(test.confidence_interval(0.95))
    others = {
        (r["settings"]["method"], r["settings"]["optimizer"]): fmean(r["test_accuracy"][-1])
        for r in STORES["cnn-pool-tuned"].read()
        if not from_this_library(r["settings"]["method"])
    }
    method, optimizer = max(others, key=others.get)
    assert row[LEAD] == f"{METHODS[method].label}, {optimizer.title()}"
    assert row[f"{LEAD} difference"] == pytest.approx(fmean(tuned_cnn("whitened-16")) - max(others.values()))


def test_rival_of_an_equation_is_the_best_without_this_library_and_a_step_has_the_price_of_the_same_network(found):
    row = found.loc["Burgers' equation, a minute, SOAP"]
    assert row[LEAD] == "self-scaled BFGS"  # GaussNewton, which is of this library, is ahead of it
    wanted = {"equation": "burgers", "optimizer": "soap", "hidden": 50, "inner": 300}.items()
    runs = [r for r in STORES["equations"].read() if wanted <= r["settings"].items()]
    own, bare = (median(pace(r) for r in runs if r["settings"]["method"] == how) for how in ("whitened", "none"))
    assert row["price of a step"] == pytest.approx(own / bare)


def test_whitening_is_of_this_library_and_so_is_gauss_newton():
    assert [from_this_library(name) for name in ("whitened", "none")] == [True, False]
    assert [from_this_library("none", name) for name in ("gauss-newton", "soap")] == [True, False]
