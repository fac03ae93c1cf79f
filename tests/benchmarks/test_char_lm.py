"""The studies of the language model: results, tables and figures."""

from benchmarks.__main__ import main
from benchmarks.core.store import Store
from benchmarks.methods import METHODS
from benchmarks.studies.texts import curve

from .test_report import is_drawn, reported


def char_lm(out, file, *arguments):
    small = ["--preset", "tiny", "--steps", "4", "--norms", "none", "--device", "cpu"]
    return main(["char-lm", "--data", str(file), "--out", str(out), *small, *arguments])


def test_several_rates_are_searched_with_one_seed_and_steps_are_timed(tmp_path, file):
    arguments = ["--methods", "adamw", "batch-ideal-adamw", "--lr", "1e-5", "1e-2", "--damping", "0.3", "--seeds", "2"]
    assert char_lm(tmp_path, file, *arguments) == 0
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
    assert char_lm(tmp_path, file, *arguments, "--time") == 0
    (time,) = store.read("time")
    assert set(time["time_ratio"]) == {"adamw", "batch-ideal-adamw"}


def made(method="adamw", seed=0, losses=(4.0, 3.0, 2.0), test_loss: float | None = 2.5, **settings):
    steps = [0, 5, 10]
    return {
        "settings": {
            "method": method, "norm": "none", "lr": 0.01, "weight_decay": 0.0, "steps": 10, "seed": seed,
            "preset": "tiny", "data": "x.txt", "device": "cpu", **settings,
        },
        "environment": {"processor": "a processor", "threads": 1, "torch": "2", "gpu": None},
        "size": {"layers": 1, "width": 16, "heads": 2, "context": 8, "batch_size": 4},
        "steps": steps,
        "validation_loss": list(losses),
        "train_loss": [None, 3.0, 2.0],
        "seconds": [0.0, 1.0, 2.0],
        "test_loss": test_loss,
        "diverged": test_loss is None,
    }  # fmt: skip


def test_table_has_the_numbers_of_the_files(tmp_path, drawn):
    results = [
        made(seed=0),
        made(seed=1, losses=(4.0, 3.0, 2.2), test_loss=2.7),
        made("muon", losses=(4.0, 3.0, 1.0), test_loss=1.5),
        made("batch-ideal-adamw", losses=(4.0, 3.0, None), test_loss=None, damping=0.3),
        made("sgd", norm="layernorm"),
    ]
    ratios = {"adamw": 1.0, "muon": 1.5, "batch-ideal-adamw": 1.25}
    times = {name: {"median": value, "rounds": 3} for name, value in ratios.items()}
    environment = results[0]["environment"]
    time = {"part": "time", "preset": "tiny", "device": "cpu", "adamw_ms": 7.0, "time_ratio": times}
    section = reported(tmp_path, "char-lm", [*results, {**time, "environment": environment}])["name"]
    assert "(7 ms): medians of 3 interleaved rounds" in section
    assert "| AdamW | no normaliser | 0.01 |  | 10 | 2.6000 ± 0.1000 | 2.1000 ± 0.1000 | 1.00 |" in section
    assert "| Muon | no normaliser | 0.01 |  | 10 | 1.5000 | 1.0000 | 1.50 |" in section
    assert "| 0.01 | 0.3 | 10 | diverged, 1 of 1 | diverged, 1 of 1 | 1.25 |" in section
    assert "| SGD, momentum 0.9 | LayerNorm | 0.01 |  | 10 | 2.5000 | 2.0000 |  |" in section
    assert "Characters of x.txt, GPT of 1 layers, width 16, 2 heads, context 8, batch 4" in section
    assert all(is_drawn(tmp_path / f"name-{quantity}.png") for quantity in ("steps", "time"))


def test_other_texts_are_other_tables(tmp_path):
    section = reported(tmp_path, "char-lm", [made(), made(data="y.txt")])["name"]
    assert "Characters of x.txt" in section
    assert "Characters of y.txt" in section
    assert (tmp_path / "name-2-steps.png").exists()


def test_curve_is_the_mean_over_seeds_where_all_have_a_loss():
    seeds = [made(losses=(4.0, 3.0, 2.0)), made(losses=(4.0, 2.0, None))]
    means = curve(seeds).groupby("steps")["loss"].mean()
    assert (list(means.index), list(means)) == ([0, 5], [4.0, 2.5])


def test_methods_of_one_figure_have_colours_of_their_own():
    for kind in ("images", "language"):
        colors = [method.color for method in METHODS.values() if method.applies == kind]
        assert len(set(colors)) == len(colors)
