"""Rates are chosen by validation accuracy alone, from one grid."""

from dataclasses import replace

import pytest
import torch

from benchmarks.core import tune
from benchmarks.core.runs import pace
from benchmarks.core.store import Store
from benchmarks.data import load
from benchmarks.ensemble import IMAGES, Ensemble, set_rate, train, train_family
from benchmarks.grids import DAMPING, RATE_FACTOR, TunedOptions, trials
from benchmarks.problems.images import ImageRun, held_out
from benchmarks.studies.tuned import BY_TRIALS, at_best

FINAL = ImageRun("digits", "none", "tanh", optimizer="sgd", schedule="cosine", epochs=2, seeds=(0, 1))
OPTIONS = TunedOptions(search_epochs=1, trials=8)


@pytest.fixture(scope="module")
def digits():
    return load("digits").to("cpu", torch.float64)


def test_trials_are_the_same_points_for_every_method_and_the_best_brings_all_its_settings(tmp_path, monkeypatch):
    rivals = [replace(FINAL, lr=0.1), replace(FINAL, method="batch-ideal", lr=10.0)]
    plain, ideal = (trials(run, OPTIONS) for run in rivals)
    assert all(run.validation and run.seeds == (0,) and run.epochs == FINAL.epochs for run in plain + ideal)
    for one, other in zip(plain, ideal, strict=True):
        assert one.damping is None
        assert other.damping in DAMPING
        assert other.lr / one.lr == pytest.approx(100, rel=0.1)  # rates are rounded to two digits
        assert other.lr * other.weight_decay == pytest.approx(one.lr * one.weight_decay, rel=0.2)
        assert 0.1 / RATE_FACTOR * 0.95 <= one.lr <= 0.1 * RATE_FACTOR * 1.05
    assert len({run.lr for run in plain}) > 4
    store = Store(tmp_path / "name.jsonl", "digits-tuned")
    monkeypatch.setattr(tune, "run_all", lambda *_, **__: None)
    for run, accuracy in zip(ideal, (1, 9, 4, 1, 1, 1, 1, 1), strict=True):
        trial = {"environment": {}, "settings": run.settings(), "part": "trials", "score": accuracy}
        store.add(run.key("trials"), trial)
    (chosen,) = at_best(rivals[1:], BY_TRIALS, OPTIONS, store)
    wanted = {name: getattr(ideal[1], name) for name in ("lr", "weight_decay", "damping")}
    assert chosen == replace(rivals[1], **wanted)


@pytest.mark.parametrize(("method", "optimizer"), [("none", "sgd"), ("batch-ideal", "adam"), ("batchnorm", "momentum")])
def test_trials_side_by_side_are_the_runs_alone(optimizer, method, digits):
    first = replace(FINAL, method=method, optimizer=optimizer, seeds=(3,), lr=0.01, validation=True, epochs=1)
    runs = [first, replace(first, lr=0.03, weight_decay=1e-2)]
    together = [torch.tensor(history.step_losses) for history in train_family(runs, digits)]
    for run, losses in zip(runs, together, strict=True):
        alone = torch.tensor(train(run, digits).step_losses)
        assert ((losses - alone).abs() / alone).max() <= 1e-10
    assert (together[0] - together[1]).abs().max() > 1e-4


def test_held_out_tenth_is_never_trained_on(digits):
    count = len(digits.train_labels)
    split = held_out(digits._replace(train_inputs=torch.arange(count).unsqueeze(1)))
    train_rows, test_rows = (set(rows.flatten().tolist()) for rows in (split.train_inputs, split.test_inputs))
    assert len(test_rows) == count // 10
    assert not train_rows & test_rows
    assert len(train_rows | test_rows) == count


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_cosine_in_an_ensemble_is_that_of_plain_loops(optimizer, digits):
    run = replace(FINAL, optimizer=optimizer, lr=0.01, epochs=1)
    changes = ({}, {"backend": "loop"}, {"schedule": "constant"})
    together, apart, constant = (torch.tensor(train(replace(run, **c), digits).step_losses) for c in changes)
    assert ((together - apart).abs() / apart).max() <= 1e-10
    assert (together[-1] - constant[-1]).abs().max() > 1e-4


def test_pace_of_a_run_that_holds_samples_out(digits):
    run = replace(FINAL, validation=True, batch_size=64)
    assert pace(run, IMAGES, digits) > 0  # its steps stay within the other samples


def test_cosine_goes_from_the_rate_to_nothing(digits):
    run = replace(FINAL, lr=0.1)
    trainer = Ensemble([run], digits)
    for progress, wanted in ((0.0, 0.1), (0.5, 0.05), (1.0, 0.0)):
        set_rate(run, trainer.optimizers, progress)
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(wanted)
