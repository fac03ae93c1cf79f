"""Optimizers of other packages in the benchmarks."""

import pytest
import torch
from torch import nn

from benchmarks.data import load
from benchmarks.ensemble import train
from benchmarks.methods import METHODS
from benchmarks.problems.friedman import Friedman, FriedmanRun
from benchmarks.problems.images import ImageRun
from benchmarks.train import train as train_field

pytestmark = pytest.mark.integration


def test_kfac_has_the_settings_of_the_optimizer_whose_place_it_takes():
    kind = pytest.importorskip("singd.optim.optimizer").SINGD
    model = nn.Linear(4, 2)
    momentum = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8, weight_decay=0.01)
    found = METHODS["singd-30"].wrap(momentum, model, torch.ones(1, 4))
    assert isinstance(found, kind)
    assert {name: found.param_groups[0][name] for name in ("lr", "momentum", "weight_decay")} == {
        "lr": 0.2, "momentum": 0.8, "weight_decay": 0.01,
    }  # fmt: skip


@pytest.mark.parametrize(("method", "optimizer", "lr"), [("singd-30", "momentum", 0.3), ("none", "soap", 0.01)])
def test_they_train(method, optimizer, lr):
    pytest.importorskip({"singd-30": "singd", "none": "pytorch_optimizer"}[method])
    run = ImageRun(
        data="digits", method=method, optimizer=optimizer, activation="tanh", lr=lr, epochs=2, seeds=(0,),
        backend="loop",
    )  # fmt: skip
    (result,) = train([run], load("digits").to("cpu", torch.float32))
    assert result["test_accuracy"][-1][0] > 75  # of ten digits


def test_kfac_is_not_trained_where_its_package_is_missing(monkeypatch):
    monkeypatch.setattr("benchmarks.optimizers.find_spec", lambda name: None)
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=r"'SINGD' needs the package singd; pip install '.\[peers\]' brings it"):
        METHODS["singd-30"].wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, torch.ones(1, 4))


def test_levenberg_marquardt_lowers_the_error_of_a_regression():
    pytest.importorskip("torch_levenberg_marquardt")
    run = FriedmanRun("", "none", optimizer="levenberg-marquardt", points=1000, steps=8)
    error = train_field(run, Friedman(run))["error"]
    assert error[-1] < 0.2 * error[0]
