"""Verdicts follow from the numbers, by scipy's tests, and say what would decide what is undecided."""

import math

import pytest
from scipy import stats

from benchmarks.catalogue import RECIPES, STUDIES
from benchmarks.core.tables import exact, spearman
from benchmarks.digests import judges, special
from benchmarks.digests.claims import CLAIMS, Claim, all_of
from benchmarks.digests.judges import Finding
from benchmarks.digests.reached import ACCURACY, Measure, reached, runs, trials
from benchmarks.digests.verdicts import DIGESTS, Verdict, decide, on_page, whole_p

from .conftest import STORES, result, stored

HIGH, LOW, WIDE = [50.0, 51.0, 52.0], [40.0, 41.0, 43.0], [30.0, 45.0, 60.0]


NATS = Measure("nats", is_lower_better=True)


def seeds(values):
    return dict(enumerate(values))


def claim(file, judge, runs="", others="", epochs="", source="", text="", against=""):
    return Claim(source, text, against, file, runs, others, judge, epochs)


def rounded(p):
    return float(f"{p:.2g}")


def lead(ours, others, measure):
    return judges.lead(seeds(ours), {name: seeds(values) for name, values in others.items()}, measure)


def within(ours, theirs, margin, measure):
    return judges.within(seeds(ours), seeds(theirs), margin, measure)


def test_difference_counts_where_welchs_p_says_so_and_is_to_the_best_of_several():
    test = stats.ttest_ind(HIGH, LOW, equal_var=False)
    low, high = test.confidence_interval(0.95)
    wanted = Finding(True, "51.00 ± 0.58 against 41.33 ± 0.88", "3, 3", [rounded(test.pvalue)])
    wanted = wanted._replace(difference=f"+9.7 points [{low:+.1f}, {high:+.1f}]")
    assert lead(HIGH, {"low": LOW}, ACCURACY) == wanted
    assert lead(LOW, {"high": HIGH}, ACCURACY).holds is False
    assert lead(LOW, {"high": HIGH}, NATS).holds is True
    assert lead(HIGH, {"wide": WIDE}, ACCURACY).holds is None
    assert stats.ttest_ind(HIGH, WIDE, equal_var=False).pvalue > 0.05
    others = {"low": LOW, "high": [60.0, 60.5, 61.0]}
    assert lead(HIGH, others, ACCURACY).holds is False
    assert "(high)" in lead(HIGH, others, ACCURACY).figure
    assert "(low)" in lead(HIGH, others, NATS).figure


def test_paired_difference_is_that_of_the_problems_that_both_learned():
    own, other, error = {1: 1.0, 2: 2.0, 3: 3.0, 4: 9.0}, {1: 2.1, 2: 2.9, 3: 4.3}, Measure("nats", True, True)
    test = stats.ttest_rel([1.0, 2.0, 3.0], [2.1, 2.9, 4.3])
    low, high = test.confidence_interval(0.95)
    text = f"-1.100 nats [{low:+.3f}, {high:+.3f}]"
    assert judges.lead(own, {"other": other}, error) == Finding(True, "", "3", [rounded(test.pvalue)], text)
    assert judges.lead(own, {"other": other}, error._replace(is_lower_better=False)).holds is False
    assert judges.lead({1: 1.0}, {"other": other}, error).holds is None  # of one pair there is no test
    assert judges.lead(own, {"other": other | {3: math.inf}}, error) == Finding(None, "a run broke down", "3")


def test_runs_shorter_than_the_claims_leave_it_undecided(tmp_path):
    methods = {"affine-like": HIGH, "none": LOW}

    def finding(epochs):
        stores = {
            "cnn": stored(tmp_path, "cnn", [result(m, accuracies=[a], epochs=epochs) for m, a in methods.items()])
        }
        return claim("cnn", "ahead", f"method=affine-like; epochs={epochs}", "method=none", "100").finding(stores)

    short, long = finding(10), finding(100)
    assert (short.holds, short.word) == (None, "10 of 100 epochs")
    assert long == short._replace(holds=True, word="")


def test_a_verdict_is_holms_but_of_losses_of_this_library():
    def holds(source, finding, corrected):
        return Verdict(claim("", "ahead", source=source), Finding(finding), corrected).holds

    assert [holds("This library", True, p) for p in (0.01, 0.2, None)] == [True, None, True]
    assert [holds("This library", False, p) for p in (0.01, 0.2, None)] == [False, False, False]
    assert [holds("Bird 2025", False, p) for p in (0.01, 0.2, None)] == [False, None, False]
    assert holds("This library", None, 0.01) is None
    of_bird = claim("cnn", "no_worse 1", source="Bird", text="claim", against="rival")
    row = Verdict(of_bird, Finding(True, n="3, 3", word="worse"), 0.2, "4, 5").row
    assert list(row[:5]) == ["Bird", "Bird: claim", "rival", "3, 3", "4, 5"]
    assert row[7] == "Undecided, worse, by its own p it holds"


def test_trials_are_the_settings_that_were_tried_whatever_the_length(tmp_path):
    def trial(method, lr, **settings):
        return {**result(method, lr=lr, **settings), "part": "search", "score": 1.0}

    shown = result("none", accuracies=(LOW,), lr=7, epochs=9)
    tried = [trial("none", 1, epochs=3), trial("none", 1, epochs=9), trial("none", 2, epochs=3), trial("dyt", 3)]
    stores = {"cnn": stored(tmp_path, "cnn", [*tried, shown])}
    assert [trials(stores, "cnn", {"method": name, "epochs": 9}) for name in ("none", "dyt", "rmsnorm")] == [2, 1, 0]
    stored(tmp_path, "cnn", [trial("dyt", 4, hidden=[9])])
    assert trials(stores, "cnn", {"method": "dyt"}) == 1  # of each network
    assert claim("cnn", "ahead", "method=dyt", "method=none").trials(stores) == "1, 2"
    assert claim("cnn", "ahead", "method=rmsnorm", "method=rmsnorm").trials(stores) == ""


NEAR, BEHIND = [50.5, 51.0, 51.5], [48.5, 49.0, 49.5]


@pytest.mark.parametrize(
    ("ours", "theirs", "margin", "measure", "holds"),
    [
        (HIGH, LOW, 1.0, ACCURACY, True), (HIGH, NEAR, 5.0, ACCURACY, True), (LOW, HIGH, 1.0, ACCURACY, False),
        (HIGH, WIDE, 5.0, ACCURACY, None), (LOW, HIGH, 1.0, NATS, True), (BEHIND, NEAR, 2.0, ACCURACY, None),
    ],
)  # fmt: skip
def test_no_worse_is_an_interval_above_the_margin(ours, theirs, margin, measure, holds):
    assert within(ours, theirs, margin, measure).holds is holds


@pytest.mark.parametrize("measure", [ACCURACY, NATS])
def test_p_of_no_worse_is_as_small_as_a_twentieth_where_the_interval_ends_at_the_margin(measure):
    ours, theirs = [50.0, 50.7, 51.1, 50.4], [52.9, 53.2, 53.0, 53.6]
    own, other = (theirs, ours) if measure is NATS else (ours, theirs)
    ends = stats.ttest_ind(own, other, equal_var=False).confidence_interval(0.95)
    far, near = sorted(map(abs, ends), reverse=True)
    for end in (far, near):
        assert within(own, other, end, measure).p == pytest.approx([0.05])
    assert within(own, other, 0.999 * near, measure).holds is False
    assert within(own, other, 1.001 * far, measure).holds is True
    assert within(other, own, near, measure).holds is True


def test_no_run_is_chosen_by_test_accuracy(tmp_path):
    def best(*accuracies, **settings):
        runs = [result("none", accuracies=[each], **settings) for each in accuracies]
        return reached({"table1": stored(tmp_path, "table1", runs)}, "table1", method="none")

    assert best([90.0], [80.0], validation=True) == seeds([90.0])
    assert best([40.0, 41.0]) == seeds([40.0, 41.0])
    with pytest.raises(ValueError, match="tells them apart"):
        best([50.0, 51.0])


def test_a_drop_is_from_the_best_epoch_to_the_last(tmp_path):
    curves = {"batchnorm": (50, 52, 49), "layernorm": (50, 51, 49), "none": (40, 44, 43), "rmsnorm": (30, 31, 32)}
    store = stored(tmp_path, "table1", [
        result(method, accuracies=[[mean - 0.5, mean + 0.5] for mean in means]) for method, means in curves.items()
    ])  # fmt: skip

    def drop(of, *others):
        return special.drop({"table1": store}, "table1", {"activation": "tanh"}, [{"method": m} for m in others], *of)

    finding = drop(["batchnorm", "layernorm"], "none", "rmsnorm")
    assert finding == Finding(True, "lose 2.0 to 3.0 points, others 0.0 to 1.0", "1 batch sizes")
    assert drop(["none"], "batchnorm", "layernorm", "rmsnorm").holds is False
    with pytest.raises(LookupError, match="not every method"):
        drop(["none"], "batchnorm", "layernorm", "rmsnorm", "l2norm")


def test_one_that_does_not_hold_is_enough_against_all():
    yes, no, undecided = (
        lead(own, {"other": other}, ACCURACY) for own, other in ((HIGH, LOW), (LOW, HIGH), (HIGH, WIDE))
    )
    assert [all_of(each).holds for each in ([yes, yes], [yes, undecided], [undecided, no])] == [True, None, False]
    twice = all_of([yes, lead(HIGH[::-1], {"other": LOW}, ACCURACY)])
    assert (twice.n, twice.p) == ("3, 3", [*yes.p, *yes.p])  # a p for every difference, if two are alike


def test_a_claim_is_of_all_settings_beside(tmp_path):
    activations = {"tanh": HIGH, "relu": HIGH, "identity": [30.0, 31.0, 32.0]}
    stores = {"cnn": stored(tmp_path, "cnn", [
        result(method, activation, [values])
        for activation, own in activations.items() for method, values in (("none", LOW), ("affine-like", own))
    ])}  # fmt: skip

    def holds(file, activations):
        return (
            claim(file, "ahead", f"method=affine-like; activation={activations}", "method=none").finding(stores).holds
        )

    assert holds("cnn", "tanh,relu") is True
    assert holds("cnn", "tanh,identity") is False
    assert holds("cnn", "tanh,gelu") is None  # has not run
    assert holds("fig2", "tanh") is None
    either = runs(stores, "cnn", method={"none", "dyt"}, activation={"tanh", "relu"}, damping=None)
    assert [r["settings"]["activation"] for r in either] == ["tanh", "relu"]


def test_slopes_and_rows_of_table_1_want_every_batch_size(tmp_path):
    runs = [result(batch_size=size, accuracies=[[50 - size / 8, 51 - size / 16]]) for size in (8, 16, 32, 64, 128)]
    store = stored(tmp_path, "table1", runs[:-1])
    settings = {"method": "none", "activation": "tanh"}
    with pytest.raises(LookupError, match="not every batch size"):
        judges.sample({"table1": store}, "table1", settings)
    stored(tmp_path, "table1", runs[-1:])
    assert judges.sample({"table1": store}, "table1", settings) == pytest.approx(seeds([43.8, 47.9]))
    down, up = (judges.slope({"table1": store}, "table1", settings, [], way) for way in ("down", "up"))
    p = stats.ttest_1samp([-0.125, -0.0625], 0.0).pvalue  # of the seeds' own slopes
    assert p > 0.05
    assert (down.holds, up.holds, down.p) == (None, None, [rounded(p)])
    assert "-9.37 ± 3.12" in down.figure
    assert down.n == "2"


def test_claims_name_results_and_commands_that_exist():
    for each in CLAIMS:
        assert each.finding(STORES) != Finding(None), each  # as one would be of a row with a mistake in it
        words = decide(each).split()
        if words:
            assert words[:3] == ["python", "-m", "benchmarks"]
            assert words[3] in STUDIES or (words[3] == "reproduce" and words[4] in RECIPES), each


def test_verdicts_without_any_results_are_all_undecided(tmp_path):
    stores = {"digits": stored(tmp_path, "digits", [result()])}
    assert not [each.text for each in CLAIMS if each.finding(stores).holds is not None]
    assert "Undecided" in DIGESTS["verdicts"].section(stores, "verdicts", tmp_path).text


def test_a_claim_of_several_differences_has_the_p_that_it_stands_on():
    assert whole_p(Finding(True, p=[0.01, 0.04])) == 0.04
    assert whole_p(Finding(False, p=[0.5, 1e-05])) == 1e-05
    assert whole_p(Finding(None, p=[0.2, 0.6])) == 0.6
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
    store = stored(tmp_path, "fig4", [
        result(method, accuracies=[[mean, mean + 0.1, mean + 0.2]], hidden=[width, width])
        for method, mean in [("affine-like", 50.0), ("none", other)] for width in (16, 64)
    ])  # fmt: skip

    def along(places, **wanted):
        ours = {"method": "affine-like", **wanted}
        return special.along({"fig4": store}, "fig4", ours, [{"method": "none"}], places)

    finding = along("all")
    assert (finding.holds, finding.figure) == (
        holds,
        f"ahead at {2 * holds} of 2 widths and depths, behind at {2 - 2 * holds}",
    )
    assert " of 1 widths" in along("wide").figure
    with pytest.raises(LookupError, match="fig4"):
        along("all", activation="identity")


def test_a_page_has_one_row_for_all_rivals_of_a_claim():
    rows = [["of", "A", rival, "5", "4, 4", difference, "0.1"] for rival, difference in (("x", "+1"), ("y", "+2"))]
    table = on_page([*rows, ["of", "B", "x", "3", "", "+1", exact(0.25)], ["of", "A", "z", "5", "4, 4", "+1", "0.1"]])
    assert table.splitlines()[2:] == ["| A | x; y; z | 5 | 4, 4 | +1; +2; +1 | 0.1 |", "| B | x | 3 |  | +1 | 0.25 |"]
