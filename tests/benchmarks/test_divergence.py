"""The side-by-side benchmark: its result is whole, its tables say what it holds, its figure is drawn."""

import pytest

from benchmarks.studies import mechanism as divergence

from .conftest import ENVIRONMENT


@pytest.fixture(scope="module")
def result(few):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "WARM_UP", 2)
        measured = divergence.compare("few", batches=2, uneven=2, timed_rounds=2)
        yield {**measured, "environment": ENVIRONMENT}


def test_every_method_is_measured_at_both_stages_and_theory_holds(result):
    assert list(result["subjects"]) == list(divergence.SUBJECTS)
    assert result["sizes"] == [32, 32, 32, 3]
    for subject in result["subjects"].values():
        for stage in result["stages"]:
            assert len(subject[stage]["layers"]) == 3
    wanted = {"proportional": 1, "disproportional": 1, "affine-like": 1, "norm-like": 2, "L2 norm": 2}
    for name, gain in wanted.items():
        for layer in result["subjects"][name]["trained"]["layers"]:
            assert layer["gain"] == pytest.approx([gain] * 3, rel=1e-5)  # float32
    assert result["subjects"]["none"]["start"]["layers"][0]["gain"][1] > 2
    assert all(result["subjects"][name]["start"]["not_downhill"] == 0 for name in ("none", "batch-ideal, 0.3"))
