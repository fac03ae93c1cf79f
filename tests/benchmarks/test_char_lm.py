"""The studies of the language model: results, tables and figures."""

import pytest

from benchmarks.__main__ import main
from benchmarks.core.store import Store
from benchmarks.methods import METHODS
from benchmarks.studies.texts import curve

from .conftest import STORES, reported


def test_several_rates_are_searched_with_one_seed_and_steps_are_timed(tmp_path, file):
    arguments = ["char-lm", "--preset", "tiny", "--steps", "4", "--norms", "none", "--device", "cpu", "--seeds", "2"]
    arguments += ["--methods", "adamw", "batch-ideal-adamw", "--lr", "1e-5", "1e-2", "--damping", "0.3"]
    arguments += ["--data", str(file), "--out", str(tmp_path)]
    assert main(arguments) == 0
    store = Store(tmp_path / "char-lm.jsonl")
    searched, final = store.read("search"), store.read()
    assert {(r["settings"]["seed"], r["settings"]["lr"]) for r in searched} == {(0, 1e-5), (0, 1e-2)}
    assert all("train_loss" not in r for r in searched)
    assert len(final) == 4
    for method in ("adamw", "batch-ideal-adamw"):
        mine = {r["settings"]["seed"]: r for r in final if r["settings"]["method"] == method}
        assert set(mine) == {0, 1}
        best = min((r for r in searched if r["settings"]["method"] == method), key=lambda result: result["score"])
        assert {r["settings"]["lr"] for r in mine.values()} == {best["settings"]["lr"]}
        assert mine[0]["validation_loss"][-1] == best["score"]  # the same run, bit for bit
    assert main([*arguments, "--time"]) == 0
    (time,) = store.read("time")
    assert set(time["time_ratio"]) == {"adamw", "batch-ideal-adamw"}


def test_runs_that_diverged_are_counted_and_left_out_of_curves(tmp_path):
    whole = next(r for r in STORES["char-lm"].read() if r["settings"]["method"] == "adamw")
    settings = {**whole["settings"], "seed": 10}
    diverged = {**whole, "validation_loss": [*whole["validation_loss"][:-1], None], "test_loss": None}
    diverged |= {"settings": settings, "diverged": True}
    assert "diverged, 1 of 2 | diverged, 1 of 2 |" in reported(tmp_path, "char-lm", [whole, diverged])["name"]
    other = [loss and loss + 1.0 for loss in diverged["validation_loss"]]
    means = curve([whole, {**diverged, "validation_loss": other}]).groupby("steps")["loss"].mean()
    assert list(means.index) == whole["steps"][:-1]
    assert list(means) == pytest.approx([loss + 0.5 for loss in whole["validation_loss"][:-1]])


def test_methods_of_one_figure_have_colours_of_their_own():
    for kind in ("images", "language"):
        colors = [method.color for method in METHODS.values() if method.applies == kind]
        assert len(set(colors)) == len(colors)
