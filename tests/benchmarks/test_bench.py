"""What `make bench` shows: its verdict is computed, and stands last."""

import pytest
from torch import nn

from benchmarks.__main__ import main
from benchmarks.core.arms import label
from benchmarks.core.store import Store
from benchmarks.problems.pictures import CoordinateRun, Fit, pixels, psnr
from benchmarks.studies import bench
from benchmarks.train import train
from examples.fit_image import FITS
from examples.fit_image import train as train_example

from .conftest import STORES, is_drawn, result, stored

SMALL = ["bench", "--steps", "2", "--seconds", "0.1", "--epochs", "1", "--seeds", "2", "--device", "cpu"]


def digits(method, optimizer, *accuracies):
    return result(method, optimizer=optimizer, accuracies=(accuracies,))


@pytest.mark.parametrize(
    ("fits", "runs", "wanted"),
    [
        (
            {"Adam": 24.0, "Muon": 30.0, "Whitened Adam": 31.04},
            [digits("batch-ideal", "sgd", 98.0, 98.1, 98.2), digits("none", "adam", 95.0, 95.1, 95.2)],
            "the picture, in equal time: Whitened Adam wins, 31.0 dB; Muon has 30.0 dB. The equation, in equal time: "
            "GaussNewton wins, relative error 0.0001; SOAP has 0.02. Digits: gradient-only batch-ideal with sgd "
            "wins; gradient-only batch-ideal with sgd has 98.1 %, none with adam has 95.1 % "
            "(p = 3.3e-06)",
        ),
        (
            {"Adam": 32.0, "Whitened Adam": 31.0},
            [digits("none", "adam", 95.0, 99.0), digits("layernorm", "sgd", 90.0, 91.0),
             digits("whitened-16", "sgd", 80.0, 99.0)],
            "the picture, in equal time: Adam wins, 32.0 dB; Whitened Adam has 31.0 dB. The equation, in equal time: "
            "GaussNewton wins, relative error 0.0001; SOAP has 0.02. Digits: nobody wins; whitened, rank 16 "
            "with sgd has 89.5 %, none with adam has 97.0 % (p = 0.57)",
        ),
    ],
)  # fmt: skip
def test_verdict_is_that_of_the_numbers(fits, runs, wanted):
    assert bench.verdict(fits, {"SOAP": 0.02, "GaussNewton": 0.0001}, runs) == wanted


def test_command_ends_with_its_pictures_and_its_verdict_and_makes_nothing_twice(tmp_path, capsys, monkeypatch, drawn):
    committed = [*Store(bench.CHOSEN).read("search"), *Store(bench.CHOSEN).read()]
    some = [r for r in committed if r["settings"]["method"] in ("none", "batch-ideal")]
    monkeypatch.setattr(bench, "CHOSEN", stored(tmp_path, "digits-optimizers", some, "chosen").path)
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    *_, first, second, _, last = capsys.readouterr().out.splitlines()
    figures = [tmp_path / f"bench{ending}.png" for ending in ("-equation", "-picture")]
    assert [first, second] == [f"figure: {figure}" for figure in figures]
    assert all(map(is_drawn, figures))
    store = Store(tmp_path / "bench.jsonl")
    fits = {r["fit"]: r["psnr"] for r in store.read() if "fit" in r}
    assert fits.keys() == FITS.keys()
    assert last.startswith("verdict: the picture, in equal time: ")
    assert f"{max(fits.values()):.1f} dB" in last
    assert {r["solver"] for r in store.read() if "solver" in r} == {"SOAP", "GaussNewton"}
    rows = {r["settings"]["method"]: r["settings"] for r in store.read() if "test_accuracy" in r}
    assert {name: row["optimizer"] for name, row in rows.items()}["batch-ideal"] == "sgd"
    assert rows["none"]["seeds"] == [1, 2]
    before = store.path.read_text()
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    assert store.path.read_text() == before
    assert main(["report", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", FITS)
def test_picture_has_the_steps_and_settings_that_the_study_fourier_chose(name):
    (settings,) = {
        tuple(r["settings"].get(each) for each in ("optimizer", "method", "steps", "lr", "damping"))
        for r in STORES["fourier"].read()
        if "time_of" in r["settings"] and label(r["settings"]).lower() == name.lower()
    }  # fmt: skip
    optimizer, method, steps, lr, damping = settings
    assert FITS[name].steps == steps
    run = CoordinateRun(
        "", method, optimizer=optimizer, lr=lr, damping=damping, network="fourier", crop=12, steps=25, seed=0
    )
    wanted = pixels(64, 12)[1].view(64, 64, 3)
    decibels = psnr(nn.functional.mse_loss(train_example(FITS[name], wanted, 25), wanted).item())
    tolerance = 0.5 if name == "Muon" else 0.01  # torch's Muon works in bfloat16
    assert decibels == pytest.approx(psnr(train(run, Fit(run)).error[-1]), abs=tolerance)
