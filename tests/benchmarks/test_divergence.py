"""The side-by-side benchmark: its result is whole, its tables say what it holds, its figure is drawn."""

import pytest

from benchmarks.core.store import Store
from benchmarks.studies import divergence

from .test_isometry import ENVIRONMENT, few
from .test_report import is_drawn


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(divergence.datasets.DATA, "few", few)
        patch.setattr(divergence, "WARM_UP", 2)
        measured = divergence.compare("few", batches=2, uneven=2, timed_rounds=2)
        yield {**measured, "environment": ENVIRONMENT}


def test_every_method_is_measured_at_both_stages_and_theory_holds(result):
    assert list(result["subjects"]) == list(divergence.SUBJECTS)
    assert result["sizes"] == [32, 32, 32, 3]
    for subject in result["subjects"].values():
        for stage in result["stages"]:
            assert len(subject[stage]["layers"]) == 3
    for name, wanted in {
        "proportional": 1,
        "disproportional": 1,
        "affine-like": 1,
        "norm-like": 2,
        "L2 norm": 2,
    }.items():
        for layer in result["subjects"][name]["trained"]["layers"]:
            assert layer["gain"] == pytest.approx([wanted] * 3, rel=1e-5)  # float32
    assert result["subjects"]["none"]["start"]["layers"][0]["gain"][1] > 2
    assert all(result["subjects"][name]["start"]["not_downhill"] == 0 for name in ("none", "batch-ideal, 0.3"))


def test_tables_and_figure_come_from_the_file_alone(result, tmp_path, drawn):
    store = Store(tmp_path / "divergence.jsonl", "divergence")
    store.add("divergence", result)
    (stored,) = store.read()
    text = divergence.STUDIES["divergence"].report(store, "divergence", tmp_path)["divergence"].text
    assert text == divergence.section(result, "divergence", tmp_path).text
    for name in divergence.SUBJECTS:
        assert text.count(f"| {name} |") >= 2
    mean = stored["subjects"]["none"]["start"]["layers"][0]["gain_mean"]
    assert f"{mean:.3g} ± " in divergence.table(stored, "start").markdown()
    assert "| one `divergence`, in training steps |" in text
    assert is_drawn(tmp_path / "divergence.png")
