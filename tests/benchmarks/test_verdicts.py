"""Verdicts follow from the numbers, by scipy's tests, and say what would decide what is undecided."""

import math
import random
from functools import partial

import pytest
from scipy import stats

from benchmarks.catalogue import RECIPES, STUDIES
from benchmarks.core.tables import spearman
from benchmarks.digests import judges, special
from benchmarks.digests.claims import CLAIMS
from benchmarks.digests.judges import Claim, Finding, every, falls, in_pairs, lead, reached, rises, within
from benchmarks.digests.verdicts import DIGESTS, decide, holm, whole_p

from .conftest import result, stored

HIGH, LOW, WIDE = [50.0, 51.0, 52.0], [40.0, 41.0, 43.0], [30.0, 45.0, 60.0]


def said(test, mean):
    """A difference with its 95 % interval, in a file and on a page."""
    low, high = (f"{end:+.3g}" for end in test.confidence_interval(0.95))
    return f"{mean}, 95 % from {low} to {high}", {"p": f"{test.pvalue:.2g}", "difference": f"{mean} [{low}, {high}]"}


def test_difference_counts_where_welchs_p_says_so():
    figure, rest = said(stats.ttest_ind(HIGH, LOW, equal_var=False), "+9.67")
    assert lead(HIGH, {"low": LOW}) == Finding(True, f"51.00 ± 0.58 against 41.33 ± 0.88, {figure}", "3, 3", **rest)
    assert lead(LOW, {"high": HIGH}).holds is False
    assert lead(LOW, {"high": HIGH}, lower=True).holds is True
    assert lead(HIGH, {"wide": WIDE}).holds is None
    assert stats.ttest_ind(HIGH, WIDE, equal_var=False).pvalue > 0.05


def test_paired_difference_is_that_of_the_problems_that_both_learned():
    own, other = {1: 1.0, 2: 2.0, 3: 3.0, 4: 9.0}, {1: 2.1, 2: 2.9, 3: 4.3}
    figure, rest = said(stats.ttest_rel([1.0, 2.0, 3.0], [2.1, 2.9, 4.3]), "-1.10")
    assert in_pairs(own, other, float, lower=True) == Finding(True, figure, "3", **rest)
    assert in_pairs(own, other, float, lower=False).holds is False


@pytest.mark.parametrize("lower", [False, True])
def test_p_of_level_is_as_small_as_a_twentieth_where_the_interval_ends_at_the_margin(lower):
    ours, theirs = [50.0, 50.7, 51.1, 50.4], [52.9, 53.2, 53.0, 53.6]
    own, other = (theirs, ours) if lower else (ours, theirs)
    ends = stats.ttest_ind(own, other, equal_var=False).confidence_interval(0.95)
    far, near = sorted(map(abs, ends), reverse=True)
    behind = within(own, other, far, lower=lower)
    assert float(behind.p) == pytest.approx(0.05)
    assert within(own, other, far, lower=lower, or_ahead=True).p == behind.p
    assert float(within(own, other, 0.999 * near, lower=lower).p) == pytest.approx(0.05, abs=1e-3)
    assert within(own, other, 0.999 * near, lower=lower).holds is False
    assert within(own, other, (near + far) / 2, lower=lower).holds is None
    assert within(own, other, 1.001 * far, lower=lower).holds is True
    assert within(other, own, near, lower=lower, or_ahead=True).holds is True


def test_no_run_is_chosen_by_test_accuracy(tmp_path):
    searched, again = (result(accuracies=[[each]], validation=True) for each in (90.0, 80.0))
    table1 = {"table1": stored(tmp_path, "table1", [searched, again])}
    assert reached(table1, "table1", "none") == [90.0]
    stored(tmp_path, "table1", [result(accuracies=[[40.0, 41.0]])])
    assert reached(table1, "table1", "none") == [40.0, 41.0]
    stored(tmp_path, "table1", [result(accuracies=[[50.0, 51.0]])])
    with pytest.raises(ValueError, match="tells them apart"):
        reached(table1, "table1", "none")


def test_one_that_does_not_hold_is_enough_against_all():
    yes, no, undecided = (lead(own, {"other": other}) for own, other in ((HIGH, LOW), (LOW, HIGH), (HIGH, WIDE)))
    assert [every(each).holds for each in ([yes, yes], [yes, undecided], [undecided, no])] == [True, None, False]
    twice = every([yes, lead(HIGH[::-1], {"other": LOW})])
    assert (twice.n, twice.p) == ("3, 3", f"{yes.p}; {yes.p}")  # a p for every difference, if two are alike


def test_slopes_and_rows_of_table_1_want_every_batch_size(tmp_path):
    def table1(*sizes):
        runs = [result(batch_size=size, accuracies=([50 - size / 8, 51 - size / 16],)) for size in sizes]
        return {"table1": stored(tmp_path, "table1", runs)}

    with pytest.raises(LookupError, match="not every batch size"):
        judges.row(table1(8, 16, 32, 64), "none", "tanh")
    stores = table1(128)
    assert judges.row(stores, "none", "tanh") == pytest.approx([43.8, 47.9])
    claim = Claim("", "table1", rises, {"method": "none", "activation": "tanh"})
    down, up = (judge(stores, claim) for judge in (falls, rises))
    p = stats.ttest_1samp([-0.125, -0.0625], 0.0).pvalue  # of the seeds' own slopes
    assert p > 0.05
    assert (down.holds, up.holds, down.p, down.n) == (None, None, f"{p:.2g}", "2")
    assert "-9.37 ± 3.12" in down.figure


def test_claims_name_commands_that_exist():
    for claim in [claim for claims in CLAIMS.values() for claim in claims]:
        words = decide(claim).split()
        assert claim.files
        if words:
            assert words[:3] == ["python", "-m", "benchmarks"]
            assert words[3] in STUDIES or (words[3] == "reproduce" and words[4] in RECIPES), claim
        else:
            assert set(claim.files.split(", ")) <= RECIPES.keys(), claim


def test_verdicts_without_any_results_are_all_undecided(tmp_path):
    stores = {"digits": stored(tmp_path, "digits", [result()])}
    assert {claim.finding(stores).holds for claims in CLAIMS.values() for claim in claims} == {None}
    assert "**undecided**" in DIGESTS["verdicts"].section(stores, "verdicts", tmp_path).text


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


@pytest.mark.parametrize(
    ("judge", "own", "message"),
    [
        (partial(special.drop, of=["batchnorm"]), {}, "has not every method at any batch size"),
        (partial(special.along, keep=lambda panel, place: False), {"method": "dyt"}, "no width or depth of those"),
    ],
    ids=["drop", "along"],
)
def test_a_judge_without_the_runs_of_its_claim_says_so(judge, own, message, tmp_path):
    stores = {"table1": stored(tmp_path, "table1", [result("none")])}
    with pytest.raises(LookupError, match=message):
        judge(stores, Claim("", "table1", judge, own, [{"method": "none"}]))
