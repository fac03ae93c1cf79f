"""Verdicts follow from the numbers, by scipy's tests, and say what would decide what is undecided."""

import math

import pytest
from scipy import stats

from benchmarks.digests import judges
from benchmarks.digests.judges import Finding
from benchmarks.digests.reached import ACCURACY, Measure, reached, runs
from benchmarks.digests.verdicts import CLAIMS, DIGESTS, Claim

from .conftest import STORES, result, stored

HIGH, LOW = [50.0, 51.0, 52.0], [40.0, 41.0, 43.0]
NATS = Measure("nats", is_lower_better=True)


def seeds(values):
    return dict(enumerate(values))


def claim(file, judge, runs="", others="", epochs="", source="", text="", against=""):
    return Claim(source, text, against, file, runs, others, judge, epochs)


def within(ours, theirs, margin, measure):
    return judges.within(seeds(ours), seeds(theirs), margin, measure)


def test_paired_difference_is_that_of_the_problems_that_both_learned():
    own, other, error = {1: 1.0, 2: 2.0, 3: 3.0, 4: 9.0}, {1: 2.1, 2: 2.9, 3: 4.3}, Measure("nats", True, True)
    test = stats.ttest_rel([1.0, 2.0, 3.0], [2.1, 2.9, 4.3])
    low, high = test.confidence_interval(0.95)
    text = f"-1.100 nats [{low:+.3f}, {high:+.3f}]"
    assert judges.lead(own, {"other": other}, error) == Finding(True, "", "3", [float(f"{test.pvalue:.2g}")], text)
    assert judges.lead(own, {"other": other}, error._replace(is_lower_better=False)).holds is False
    assert judges.lead({1: 1.0}, {"other": other}, error).holds is None  # of one pair there is no test
    assert judges.lead(own, {"other": other | {3: math.inf}}, error) == Finding(None, "a run broke down", "3")


def test_runs_shorter_than_the_claims_leave_it_undecided(tmp_path):
    methods = {"affine-like": HIGH, "none": LOW}

    def finding(epochs):
        results = [result(m, accuracies=[a], epochs=epochs) for m, a in methods.items()]
        stores = {"cnn": stored(tmp_path, "cnn", results)}
        return claim("cnn", "ahead", f"method=affine-like; epochs={epochs}", "method=none", "100").finding(stores)

    short, long = finding(10), finding(100)
    assert (short.holds, short.word) == (None, "10 of 100 epochs")
    assert long == short._replace(holds=True, word="")


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


def test_a_claim_is_of_all_settings_beside(tmp_path):
    activations = {"tanh": HIGH, "relu": HIGH, "identity": [30.0, 31.0, 32.0]}
    stores = {"cnn": stored(tmp_path, "cnn", [
        result(method, activation, [values])
        for activation, own in activations.items() for method, values in (("none", LOW), ("affine-like", own))
    ])}  # fmt: skip

    def holds(file, activations):
        of_all = claim(file, "ahead", f"method=affine-like; activation={activations}", "method=none")
        return of_all.finding(stores).holds

    assert holds("cnn", "tanh,relu") is True
    assert holds("cnn", "tanh,identity") is False
    assert holds("cnn", "tanh,gelu") is None  # has not run
    assert holds("fig2", "tanh") is None
    either = runs(stores, "cnn", method={"none", "dyt"}, activation={"tanh", "relu"}, damping=None)
    assert [r["settings"]["activation"] for r in either] == ["tanh", "relu"]


def test_rows_of_table_1_want_every_batch_size(tmp_path):
    runs = [result(batch_size=size, accuracies=[[50 - size / 8, 51 - size / 16]]) for size in (8, 16, 32, 64, 128)]
    store = stored(tmp_path, "table1", runs[:-1])
    settings = {"method": "none", "activation": "tanh"}
    with pytest.raises(LookupError, match="not every batch size"):
        judges.sample({"table1": store}, "table1", settings)
    stored(tmp_path, "table1", runs[-1:])
    assert judges.sample({"table1": store}, "table1", settings) == pytest.approx(seeds([43.8, 47.9]))


def test_claims_name_results_that_exist():
    for each in CLAIMS:
        assert each.finding(STORES) != Finding(None), each  # as one would be of a row with a mistake in it


def test_verdicts_without_any_results_are_all_undecided(tmp_path):
    stores = {"digits": stored(tmp_path, "digits", [result()])}
    assert not [each.text for each in CLAIMS if each.finding(stores).holds is not None]
    assert "Undecided" in DIGESTS["verdicts"].section(stores, "verdicts", tmp_path).text
