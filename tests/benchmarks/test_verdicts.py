"""Verdicts follow from the numbers, by scipy's tests, and say what would decide what is undecided."""

import csv
import math
import random
from functools import partial

import pytest
from scipy import stats

from benchmarks.catalogue import RECIPES, STUDIES
from benchmarks.core.store import Store
from benchmarks.core.tables import spearman
from benchmarks.digests import claims_of_papers, judges
from benchmarks.digests.judges import Claim, Finding, ahead, best, every, level, line, reached
from benchmarks.digests.verdicts import CLAIMS, DIGESTS, decide, holm, is_shown, whole_p

from .test_report import ROOT, result

ALL = [claim for claims in CLAIMS.values() for claim in claims]
HIGH, LOW, WIDE = [50.0, 51.0, 52.0], [40.0, 41.0, 43.0], [30.0, 45.0, 60.0]


def sample(values):
    return lambda stores: values


def test_difference_counts_where_welchs_p_says_so():
    found = ahead(sample(HIGH), sample(LOW))({})
    test = stats.ttest_ind(HIGH, LOW, equal_var=False)
    ends = "from {:+.3g} to {:+.3g}".format(*test.confidence_interval(0.95))
    figure = f"51.00 ± 0.58 against 41.33 ± 0.88, +9.67, 95 % {ends}"
    assert found == Finding(True, figure, "3, 3", f"{test.pvalue:.2g}")
    assert ahead(sample(LOW), sample(HIGH))({}).holds is False
    assert ahead(sample(LOW), sample(HIGH), lower=True)({}).holds is True
    assert ahead(sample(HIGH), sample(WIDE))({}).holds is None
    assert stats.ttest_ind(HIGH, WIDE, equal_var=False).pvalue > 0.05


def test_paired_difference_is_that_of_the_problems_that_both_learned():
    own, other = {1: 1.0, 2: 2.0, 3: 3.0, 4: 9.0}, {1: 2.1, 2: 2.9, 3: 4.3}
    found = judges.judged_in_pairs(own, other, float, lower=True)
    test = stats.ttest_rel([1.0, 2.0, 3.0], [2.1, 2.9, 4.3])
    ends = "from {:+.3g} to {:+.3g}".format(*test.confidence_interval(0.95))
    assert found == Finding(True, f"-1.10, 95 % {ends}", "3", f"{test.pvalue:.2g}")
    assert judges.judged_in_pairs(own, other, float).holds is False


def test_runs_shorter_than_the_claims_leave_it_undecided(tmp_path):
    store = Store(tmp_path / "fig2.jsonl", "fig2")
    store.add("a", result("none", accuracies=(LOW,), epochs=10))
    held = Finding(True, "figure", "3", "0.01")
    for epochs, wanted in ((10, held), (100, held._replace(holds=None, word="10 of 100 epochs"))):
        assert judges.at_length(lambda stores: held, "fig2", epochs)({"fig2": store}) == wanted


def test_a_page_shows_what_holm_leaves_decided_and_losses_of_this_library():
    held, refuted, undecided = (Finding(holds, p="0.01") for holds in (True, False, None))
    assert [is_shown("This library", held, p) for p in (0.01, 0.2, None)] == [True, False, False]
    assert is_shown("This library", refuted, 0.9)
    assert not is_shown("Bird 2025", refuted, 0.9)
    assert not is_shown("This library", undecided, 0.01)


def test_what_verdicts_leave_to_the_table_of_calls_stands_there():
    tables = ROOT / "docs" / "results" / "tables"
    claims, calls = (
        list(csv.DictReader((tables / f"{name}.csv").read_text().splitlines())) for name in ("verdicts-hold", "calls")
    )
    left_out = {claim.text.replace("`", "") for claim in ALL if claim.in_calls}
    gain = "gain over the optimizer (95 %)"
    gains = {f"{float(row[f'{gain} low']):+.3g} to {float(row[f'{gain} high']):+.3g}" for row in calls}
    intervals = {row["claim"]: row["difference (95 %)"].rpartition("from ")[2] for row in claims}
    held = {text: intervals[text] for text in left_out if text in intervals}
    assert held
    assert set(held.values()) <= gains


def test_level_is_an_interval_within_the_margin():
    assert level(sample(HIGH), sample([50.5, 51.0, 51.5]), 5.0)({}).holds is True
    assert level(sample(HIGH), sample(LOW), 1.0)({}).holds is False
    assert level(sample(HIGH), sample(WIDE), 5.0)({}).holds is None


@pytest.mark.parametrize("lower", [False, True])
def test_p_of_level_is_as_small_as_a_twentieth_where_the_interval_ends_at_the_margin(lower):
    ours, theirs = [50.0, 50.7, 51.1, 50.4], [52.9, 53.2, 53.0, 53.6]
    own, other = (theirs, ours) if lower else (ours, theirs)
    ends = stats.ttest_ind(own, other, equal_var=False).confidence_interval(0.95)
    far, near = sorted(map(abs, ends), reverse=True)
    behind = level(sample(own), sample(other), far, lower=lower)({})
    assert float(behind.p) == pytest.approx(0.05)
    assert level(sample(own), sample(other), far, lower=lower, or_ahead=True)({}).p == behind.p
    assert float(level(sample(own), sample(other), 0.999 * near, lower=lower)({}).p) == pytest.approx(0.05, abs=1e-3)
    assert level(sample(own), sample(other), 0.999 * near, lower=lower)({}).holds is False
    assert level(sample(own), sample(other), 1.001 * far, lower=lower)({}).holds is True
    assert level(sample(other), sample(own), near, lower=lower, or_ahead=True)({}).holds is True


def test_a_difference_within_or_beyond_the_margin_is_named():
    worse, better = ([mean + spread for spread in (-0.5, 0.0, 0.5)] for mean in (49.0, 51.0))
    found = level(sample(worse), sample(better), 2.0)({})
    assert (found.holds, found.word) == (None, "worse")
    assert level(sample(better), sample(worse), 2.0)({}).word == "better"
    assert level(sample(worse), sample(better), 2.0, lower=True)({}).word == "better"
    assert level(sample(HIGH), sample(WIDE), 5.0)({}).word == ""
    claim = Claim("claim", "file", level(sample(worse), sample(better), 2.0))
    text, verdict, figures, *_ = line(claim, claim.found({}), "command")
    assert (text, verdict, figures[:5]) == ("claim", "**undecided**, worse", "49.00")


def test_ahead_will_do_where_level_would():
    ahead_by_far, level_too = level(sample(HIGH), sample(LOW), 1.0, or_ahead=True), sample([50.5, 51.0, 51.5])
    assert ahead_by_far({}).holds is True
    assert level(sample(HIGH), level_too, 5.0, or_ahead=True)({}).holds is True
    assert level(sample(LOW), sample(HIGH), 1.0, or_ahead=True)({}).holds is False
    assert level(sample(LOW), sample(HIGH), 1.0, lower=True, or_ahead=True)({}).holds is True
    assert level(sample(HIGH), sample(WIDE), 5.0, or_ahead=True)({}).holds is None


def test_no_run_is_chosen_by_test_accuracy(tmp_path):
    store, judge = Store(tmp_path / "table1.jsonl", "table1"), reached("table1", "none")
    searched = {"accuracies": [[90.0]], "validation": True}
    store.add("searched", result("none", **searched))
    store.add("searched too", result("none", **{**searched, "accuracies": [[80.0]]}))
    assert judge({"table1": store}) == [90.0]
    store.add("tested", result("none", accuracies=[[40.0, 41.0]]))
    assert judge({"table1": store}) == [40.0, 41.0]
    store.add("tested too", result("none", accuracies=[[50.0, 51.0]]))
    with pytest.raises(ValueError, match="tells them apart"):
        judge({"table1": store})


def test_a_drop_is_from_the_best_epoch_to_the_last(tmp_path):
    store = Store(tmp_path / "table1.jsonl", "table1")
    curves = {"batchnorm": (50, 52, 49), "layernorm": (50, 51, 49), "none": (40, 44, 43), "rmsnorm": (30, 31, 32)}
    for number, (method, means) in enumerate(curves.items()):
        store.add(str(number), result(method, accuracies=[[mean - 0.5, mean + 0.5] for mean in means]))
    drop = claims_of_papers.drop(["batchnorm", "layernorm"], list(curves), "tanh")
    assert drop({"table1": store}) == Finding(True, "lose 2.0 to 3.0 points, others 0.0 to 1.0", "1 batch sizes")
    assert claims_of_papers.drop(["none"], list(curves), "tanh")({"table1": store}).holds is False
    with pytest.raises(LookupError, match="not every method"):
        claims_of_papers.drop(["none"], [*curves, "l2norm"], "tanh")({"table1": store})


def test_best_is_held_against_the_best_of_the_others():
    others = {"low": sample(LOW), "high": sample([60.0, 60.5, 61.0])}
    found = best(sample(HIGH), others)({})
    assert found.holds is False
    assert "(high)" in found.figure
    assert "(low)" in best(sample(HIGH), others, lower=True)({}).figure


def test_one_that_does_not_hold_is_enough_against_all():
    yes, no, open_ = (ahead(sample(a), sample(b)) for a, b in ((HIGH, LOW), (LOW, HIGH), (HIGH, WIDE)))
    assert [every(judges)({}).holds for judges in ([yes, yes], [yes, open_], [open_, no])] == [True, None, False]
    twice, p = every([yes, ahead(sample(HIGH[::-1]), sample(LOW))])({}), yes({}).p
    assert (twice.n, twice.p) == ("3, 3", f"{p}; {p}")  # a p for every difference, if two are alike


def test_missing_runs_are_undecided(tmp_path):
    store = Store(tmp_path / "there.jsonl", "compare")
    store.add("a", result("none", accuracies=(LOW,)))
    store.add("b", result("affine-like", accuracies=(HIGH,)))
    found = {
        name: Claim("", name, ahead(reached(name, method="affine-like"), reached(name, method="none"))).found(
            {"there": store}
        )
        for name in ("there", "missing")
    }
    assert found["there"].holds is True
    assert found["missing"] == Finding(None)


def test_slopes_and_rows_of_table_1_want_every_batch_size(tmp_path):
    store = Store(tmp_path / "table1.jsonl", "table1")
    sizes = (8, 16, 32, 64, 128)
    for size in sizes[:-1]:
        store.add(str(size), result(batch_size=size, accuracies=([50 - size / 8, 51 - size / 16],)))
    with pytest.raises(LookupError, match="not every batch size"):
        judges.row("none", "tanh")({"table1": store})
    store.add("128", result(batch_size=128, accuracies=([34.0, 43.0],)))
    assert judges.row("none", "tanh")({"table1": store}) == pytest.approx([43.8, 47.9])
    falls, rises = (judges.slope("none", "tanh", sign)({"table1": store}) for sign in (-1, 1))
    p = stats.ttest_1samp([-0.125, -0.0625], 0.0).pvalue  # of the seeds' own slopes
    assert p > 0.05
    assert (falls.holds, rises.holds, falls.p) == (None, None, f"{p:.2g}")
    assert "-9.37 ± 3.12" in falls.figure
    assert falls.n == "2"


def test_claims_name_commands_that_exist():
    for claim in ALL:
        words = decide(claim).split()
        assert claim.files
        if words:
            assert words[:3] == ["python", "-m", "benchmarks"]
            assert words[3] in STUDIES or (words[3] == "reproduce" and words[4] in RECIPES), claim
        else:
            assert set(claim.files.split(", ")) <= RECIPES.keys(), claim


def test_verdicts_without_any_results_are_all_undecided(tmp_path):
    store = Store(tmp_path / "digits.jsonl", "digits")
    store.add("a", result())
    assert not [claim.text for claim in ALL if claim.found({"digits": store}).holds is not None]
    assert "**undecided**" in DIGESTS["verdicts"].section({"digits": store}, "verdicts", tmp_path).text


def test_holms_p_is_the_definition():
    """The k-th smallest p times n - k + 1, and the greatest of those up to it."""
    generator = random.Random(0)
    for count in (1, 2, 7, 30):
        values = [generator.random() ** 3 for _ in range(count)]
        ordered = sorted(values)
        steps = [min(1.0, (count - k) * p) for k, p in enumerate(ordered)]
        wanted = {p: max(steps[: k + 1]) for k, p in enumerate(ordered)}
        assert holm(values) == [wanted[p] for p in values]


def test_a_claim_of_several_differences_has_the_p_that_it_stands_on():
    assert whole_p(Finding(True, p="0.01; 0.04")) == 0.04
    assert whole_p(Finding(False, p="0.5; 1e-05")) == 1e-05
    assert whole_p(Finding(None, p="0.2; 0.6")) == 0.6
    assert whole_p(Finding(True)) is None


@pytest.mark.parametrize("ties", [False, True])
def test_p_of_a_short_rank_correlation_counts_all_permutations(ties):
    left, right = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 1.0, 4.0, 4.0 if ties else 3.0, 6.0, 5.0]
    found = spearman(left, right)
    test = stats.permutation_test(
        (right,), lambda x: stats.spearmanr(left, x).statistic, permutation_type="pairings", n_resamples=math.inf
    )
    assert found.statistic == pytest.approx(test.statistic, abs=1e-12)
    assert found.pvalue == pytest.approx(test.pvalue, abs=1e-12)
    assert abs(found.pvalue - stats.spearmanr(left, right).pvalue) > 0.003  # whose approximation is not exact


@pytest.mark.parametrize(("other", "holds"), [(30.0, True), (60.0, False)])
def test_lead_along_widths_is_of_the_places_that_the_claim_is_about_and_never_of_none(tmp_path, other, holds):
    store = Store(tmp_path / "fig4.jsonl", "fig4")
    for method, mean in [("affine-like", 50.0), ("none", other)]:
        for width in (16, 64):
            run = result(method, accuracies=[[mean, mean + 0.1, mean + 0.2]], hidden=[width, width])
            store.add(f"{method} {width}", run)
    along = partial(claims_of_papers.along, "fig4", "affine-like", ["none"])
    found = along()({"fig4": store})
    assert (found.holds, found.figure.split()[2]) == (holds, "2" if holds else "0")
    for nothing in (along(keep=lambda panel, place: place > 64), along(activation="identity")):
        with pytest.raises(LookupError, match="fig4"):
            nothing({"fig4": store})
