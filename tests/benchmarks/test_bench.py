"""What `make bench` shows, and that its pictures are learned with the settings of the study `fourier`."""

import pytest
import torch
from torch import nn

from benchmarks.__main__ import main
from benchmarks.core.arms import label
from benchmarks.core.store import Store
from benchmarks.problems.pictures import CoordinateRun, Fit, pixels, psnr
from benchmarks.studies import bench
from benchmarks.train import train
from examples.fit_image import FITS
from examples.fit_image import train as train_example

from .conftest import STORES, stored

SMALL = ["bench", "--steps", "2", "--seconds", "1", "--epochs", "1", "--seeds", "2", "--device", "cpu"]


def test_command_draws_pictures_reports_digits_and_makes_nothing_twice(tmp_path, capsys, monkeypatch):
    committed = [*Store(bench.CHOSEN).read("search"), *Store(bench.CHOSEN).read()]
    some = [r for r in committed if r["settings"]["method"] in ("none", "batch-ideal")]
    monkeypatch.setattr(bench, "CHOSEN", stored(tmp_path, "digits-optimizers", some, "chosen").path)
    threads = torch.get_num_threads()
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    assert torch.get_num_threads() == threads
    printed = capsys.readouterr().out
    assert "Whitened SOAP: " in printed
    assert "GaussNewton: relative error " in printed
    figures = [tmp_path / f"bench{ending}.png" for ending in ("-equation", "-picture")]
    assert printed.splitlines()[-3:-1] == [f"figure: {figure}" for figure in figures]
    store = Store(tmp_path / "bench.jsonl")
    rows = {r["settings"]["method"]: r["settings"] for r in store.read()}
    assert {name: row["optimizer"] for name, row in rows.items()}["batch-ideal"] == "sgd"
    assert rows["none"]["seeds"] == [1, 2]
    before = store.path.read_text()
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    assert "bench-picture.png is there already" in capsys.readouterr().out
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
    assert decibels == pytest.approx(psnr(train(run, Fit(run))["error"][-1]), abs=tolerance)
