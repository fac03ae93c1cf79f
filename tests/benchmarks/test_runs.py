"""Runs are told apart by their settings, and results are whole or absent."""

from dataclasses import replace

import pytest

from benchmarks.runs import Run, environment, public_name, read, write

RUN = Run("digits", "none", "tanh")


@pytest.mark.parametrize(
    "change", [{"lr": 1e-2}, {"seeds": (0,)}, {"hidden": (64,)}, {"epochs": 1}, {"method": "rmsnorm"}, {"data": "fake"}]
)
def test_other_settings_are_another_file(change):
    assert replace(RUN, **change).filename != RUN.filename
    assert replace(RUN).filename == RUN.filename


def test_where_data_lies_is_not_part_of_a_result(tmp_path):
    here, there = (replace(RUN, data=f"imagefolder:{tmp_path / place / 'photos'}") for place in "ab")
    assert here.filename == there.filename
    assert here.settings()["data"] == public_name(here.data) == "imagefolder:photos"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "groupnorm"}, "unknown method 'groupnorm'; known are none, batchnorm"),
        ({"activation": "sine"}, "unknown activation 'sine'; known are tanh, leaky-relu"),
        ({"backend": "magic"}, "unknown backend 'magic'; known are ensemble, loop, jacobian"),
        ({"method": "whitened"}, "method 'whitened' sees forward passes, which only backend 'loop'"),
        ({"damping": 1.0}, "damping is 1.0, but method 'none' has none"),
        ({"lr": -1.0}, r"lr is -1\.0; it must be positive"),
        ({"epochs": 0}, "epochs is 0; it must be positive"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(RUN, **change)


def test_failed_write_leaves_the_old_result_and_nothing_else(tmp_path):
    path = tmp_path / "result.json"
    write(path, {"value": 1})
    with pytest.raises(TypeError):
        write(path, {"value": 2, "rest": object()})
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    assert read(tmp_path) == [{"value": 1}]


def test_environment_names_versions_and_hardware():
    found = environment()
    assert found["torch"]
    assert found["processor"]
    assert found["threads"] >= 1
