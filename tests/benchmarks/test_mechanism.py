"""Divergence of one step and along runs: what is measured is the real step's, and ranks are those of the numbers."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from adiv_optim.diagnostics import divergence
from benchmarks.__main__ import main
from benchmarks.core.runs import Watch
from benchmarks.core.store import Store
from benchmarks.data import load
from benchmarks.ensemble import Loops
from benchmarks.problems.images import ImageRun, take
from benchmarks.studies import mechanism

from .conftest import result, stored


@pytest.mark.parametrize("method", ["none", "batch-ideal", "whitened"])
def test_first_point_is_the_divergence_of_the_first_step(method):
    digits = load("digits").to("cpu", torch.float64)
    run = ImageRun("digits", method, "tanh", (5,), 256, "sgd", lr=0.1, epochs=2, seeds=(0,), backend="loop")
    noted = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: noted.append(scalar))
    found = mechanism.follow(run, digits, Watch(writer=writer))
    assert [(step, value) for name, value, step in noted if name == "cosine"] == list(
        zip(found["steps"], found["cosine"], strict=True)
    )
    assert found["steps"][0] == 0
    assert len(found["cosine"]) == len(set(found["steps"])) == mechanism.POINTS
    assert found["cosine"][-1] != found["cosine"][0]
    trainer, generator = Loops(run, digits), torch.Generator().manual_seed(1)
    cosines = []
    for _ in range(mechanism.BATCHES):
        inputs, labels = take(digits, torch.randint(1438, (256,), generator=generator))
        measured = divergence(trainer.models[0], F.cross_entropy, inputs, labels, optimizer=trainer.optimizers[0])
        cosines += [layer.cosine.nanmedian() for layer in measured.layers.values()]
    assert found["cosine"][0] == pytest.approx(torch.stack(cosines).mean().item(), rel=1e-5)


def test_command_follows_the_runs_of_a_file(tmp_path, capsys):
    followed = result("affine-like", hidden=[4], batch_size=256, epochs=1, weight_decay=0.1)
    tuned = stored(tmp_path, "compare", [followed], "tuned")
    command = ["mechanism", "--tuned", str(tuned.path), "--seeds", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    (found,) = Store(tmp_path / "mechanism.jsonl").read()
    assert found["settings"] == {**followed["settings"], "seeds": [0], "backend": "loop", "validation": False}
    assert main(command) == 0  # it is there
    assert "affine-like" in capsys.readouterr().out


def test_every_method_is_measured_at_both_stages_and_theory_holds(few, monkeypatch):
    monkeypatch.setattr(mechanism, "WARM_UP", 2)
    compared = mechanism.compare("few", batches=2, uneven=2, timed_rounds=2)
    assert list(compared["subjects"]) == list(mechanism.SUBJECTS)
    assert compared["sizes"] == [32, 32, 32, 3]
    for subject in compared["subjects"].values():
        for stage in compared["stages"]:
            assert len(subject[stage]["layers"]) == 3
    wanted = {"proportional": 1, "disproportional": 1, "affine-like": 1, "norm-like": 2, "L2 norm": 2}
    for name, gain in wanted.items():
        for layer in compared["subjects"][name]["trained"]["layers"]:
            assert layer["gain"] == pytest.approx([gain] * 3, rel=1e-5)  # float32
    assert compared["subjects"]["none"]["start"]["layers"][0]["gain"][1] > 2
    assert all(compared["subjects"][name]["start"]["not_downhill"] == 0 for name in ("none", "batch-ideal, 0.3"))
