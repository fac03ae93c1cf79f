"""The language model: text, network, optimizers and training."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.core.store import Store
from benchmarks.methods import METHODS
from benchmarks.optimizers import matrices
from benchmarks.problems.language import TextRun, Trainer, batches, build_model, build_optimizers, dampings, train
from benchmarks.studies.language import curve
from examples import gpt as text
from examples.gpt import GPT, NORMS, PRESETS, all_windows

from .conftest import STORES, reported

ADAMW = TextRun(text.DEFAULT, "adamw", "layernorm", 1e-2, steps=6, preset="tiny")
BATCH_IDEAL = replace(ADAMW, method="batch-ideal-adamw", damping=0.3)
NAMES = [
    pytest.param(name, marks=[pytest.mark.integration] * (method.optimizer not in ("adamw", "muon", "sgd")), id=name)
    for name, method in METHODS.items()
    if method.applies == "language"
]


def test_batches_are_those_of_the_seed_whatever_the_method(sample):
    one, other = (list(batches(run, sample.train)) for run in (ADAMW, BATCH_IDEAL))
    assert len(one) == ADAMW.steps
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], next(batches(replace(ADAMW, seed=1), sample.train)))
    assert one[0].shape == (4, 9)
    # Windows are pieces of the text: the next one's start is drawn anew.
    assert any(torch.equal(one[0][0], window) for window in sample.train.unfold(0, 9, 1))


def test_methods_start_from_the_same_losses_and_part_then(sample):
    one, other = train(ADAMW, sample), train(BATCH_IDEAL, sample)
    assert one.validation_loss[0] == other.validation_loss[0] == pytest.approx(math.log(len(sample.vocabulary)), 0.02)
    assert one.train_loss[:2] == other.train_loss[:2]
    assert one.train_loss[-1] != other.train_loss[-1]
    for history in (one, other):
        assert history.steps == list(range(7))
        assert history.seconds == sorted(history.seconds)
        assert history.validation_loss[-1] < history.validation_loss[0]
        assert history.test_loss is not None
        assert not history.diverged


def test_loss_that_is_not_finite_ends_the_run_and_is_recorded(sample):
    history = train(replace(ADAMW, method="sgd", norm="none", lr=1e30, steps=100), sample)
    assert history.diverged
    assert history.steps[-1] < 100
    assert history.validation_loss[-1] is None
    assert history.test_loss is None
    json.dumps(asdict(history), allow_nan=False)


def test_norm_does_not_change_what_is_drawn(sample):
    weights = [matrices(build_model(replace(ADAMW, norm=norm), len(sample.vocabulary))) for norm in NORMS]
    assert all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_hold_every_parameter_once_and_train(name, sample):
    pytest.importorskip({"kfac": "singd", "schedulefree": "schedulefree"}.get(METHODS[name].optimizer, "torch"))
    run, model = replace(ADAMW, method=name, damping=dampings(name, [1.0])[0]), GPT(PRESETS["tiny"], 11, "layernorm")
    optimizers = build_optimizers(model, run)
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    history = train(run, sample)
    # In so few steps SGD only just begins.
    assert history.validation_loss[-1] < history.validation_loss[0] or name in ("sgd", "whitened-sgd")


def test_schedule_free_is_measured_at_its_average(sample):
    pytest.importorskip("schedulefree")
    run = replace(ADAMW, method="schedulefree")
    trainer = Trainer(run, sample)
    for number, windows in enumerate(batches(run, sample.train), start=1):
        trainer.step(number, windows)
    where_it_trains = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    measured = trainer.evaluate(all_windows(sample.validation, run.size))
    now = list(trainer.model.parameters())
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(where_it_trains, now, strict=True))
    trainer.optimizers[0].eval()
    trainer.optimizers = []
    assert trainer.evaluate(all_windows(sample.validation, run.size)) == pytest.approx(measured, rel=1e-6)
    assert not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(where_it_trains, now, strict=True))


def test_damping_is_the_runs(sample):
    for method in ("batch-ideal-adamw", "whitened-adamw"):
        one, other = (train(replace(BATCH_IDEAL, method=method, damping=damping), sample) for damping in (0.01, 10.0))
        assert one.train_loss[-1] != other.train_loss[-1]


@pytest.mark.parametrize("method", ["adamw", "muon"])
def test_embeddings_have_a_rate_of_their_own_where_it_is_asked_for(method):
    def moved(embedding_lr):
        run = TextRun("t", method, "none", 1e-2, preset="tiny", embedding_lr=embedding_lr)
        model = build_model(run, 11)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        for optimizer in build_optimizers(model, run):
            optimizer.step()
        return {name: (p - before[name]).abs().mean().item() for name, p in model.named_parameters()}

    rest, own = moved(None), moved(0.5)
    for name, step in rest.items():
        assert own[name] == pytest.approx(0.5 if "embedding" in name else step, rel=1e-4), name


def test_gradients_are_cut_to_the_norm(sample):
    run = TextRun(text.DEFAULT, "sgd", "none", 1e-2, preset="tiny", clip=1e-3)
    trainer = Trainer(run, sample)
    trainer.step(1, sample.train[:36].view(4, 9))
    norms = [p.grad.norm() for p in trainer.model.parameters()]
    assert torch.stack(norms).norm() == pytest.approx(1e-3, rel=1e-3)


def test_a_search_keeps_scores_alone_and_steps_are_timed(tmp_path, file):
    arguments = ["char-lm", "--preset", "tiny", "--steps", "4", "--norms", "none", "--device", "cpu", "--seeds", "2"]
    arguments += ["--methods", "adamw", "batch-ideal-adamw", "--lr", "1e-5", "1e-2", "--damping", "0.3"]
    arguments += ["--data", str(file), "--out", str(tmp_path)]
    assert main(arguments) == 0
    store = Store(tmp_path / "char-lm.jsonl")
    searched, final = store.read("search"), store.read()
    assert all("train_loss" not in r for r in searched)
    best = min(r["score"] for r in searched)
    assert best in {r["validation_loss"][-1] for r in final}  # the same run, bit for bit
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
