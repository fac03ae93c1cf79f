"""Methods behind optimizers: each pair at the best of its own trials, and the optimizers that this brings."""

from dataclasses import replace

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.core.store import Store, setting
from benchmarks.data import load
from benchmarks.ensemble import build_optimizer
from benchmarks.grids import best_optimizer
from benchmarks.problems.images import ImageRun, build_model
from benchmarks.studies.tuned import DAMPINGS, FIRST, RATES

RUN = ImageRun("digits", "none", "tanh", optimizer="sgd", epochs=1, seeds=(1, 2, 3))


def test_every_pair_has_its_best_trial_and_other_seeds(tmp_path):
    command = ["mlp-tuned", "--methods", "none", "batch-ideal", "--optimizers", "sgd", "--activations", "tanh"]
    command += [
        "--data",
        "digits",
        "--epochs",
        "1",
        "--batch-size",
        "512",
        "--seeds",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert main(command) == 0
    store = Store(tmp_path / "mlp-tuned.jsonl")
    for result in store.read():
        settings = result["settings"]
        tried = [r for r in store.read("search") if setting("method")(r) == settings["method"]]
        assert all(r["settings"]["seeds"] == [0] and r["settings"]["validation"] for r in tried)
        assert (settings["seeds"], settings["validation"], settings["schedule"]) == ([1, 2], False, "cosine")
        best = max(tried, key=lambda r: r["score"])["settings"]
        assert (settings["lr"], settings.get("damping")) == (best["lr"], best.get("damping"))
        # The best is no edge of what was tried with its damping, where the ladder goes on.
        same = {r["settings"]["lr"] for r in tried if r["settings"].get("damping") == settings.get("damping")}
        place = RATES.index(settings["lr"])
        assert {*FIRST["sgd"], *RATES[max(0, place - 1) : place + 2]} <= same
        dampings = {r["settings"].get("damping") for r in tried}
        assert dampings == ({None} if settings["method"] == "none" else set(DAMPINGS))
    assert [setting("method")(r) for r in store.read()] == ["none", "batch-ideal"]


def test_best_optimizer_is_that_of_the_best_trial_and_no_rivals(tmp_path):
    store = Store(tmp_path / "results.jsonl", "mlp-tuned")
    for optimizer, activation, score in (
        ("sgd", "tanh", 50.0), ("muon", "tanh", 52.0), ("sgd", "tanh", 51.0), ("adam", "leaky-relu", 60.0),
        ("soap", "tanh", 70.0),
    ):  # fmt: skip
        run = replace(RUN, optimizer=optimizer, activation=activation, lr=score)
        store.add(run.key("search"), {"part": "search", "score": score, "environment": {}, "settings": run.settings()})
    assert best_optimizer(store, "none", "tanh") == "muon"
    with pytest.raises(LookupError, match="no trials of batchnorm with tanh"):
        best_optimizer(store, "batchnorm", "tanh")


@pytest.mark.integration
def test_muon_steps_what_is_inside_and_adam_the_rest():
    pytest.importorskip("pytorch_optimizer")
    run = replace(RUN, optimizer="muon", lr=0.01, hidden=(8, 6, 6), network="cnn")
    model = build_model(run, load("digits"), 0)
    optimizer = build_optimizer(run, run.make_method(), model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    *inside, last = [place for place, p in enumerate(before) if p.dim() > 1]
    assert len(inside) == 3
    for place, (p, old, gradient) in enumerate(zip(model.parameters(), before, gradients, strict=True)):
        step = (p.detach() - old).flatten(1) if p.dim() > 1 else p.detach() - old
        if place in inside:
            # Newton–Schulz in bfloat16 brings singular values to between 0.7 and 1.2; the step has Adam's RMS.
            values = torch.linalg.svdvals(step) / (0.01 * 0.2 * max(step.shape) ** 0.5)
            assert values.min() > 0.5
            assert values.max() < 1.3
        else:
            assert torch.allclose(step.view_as(gradient), -0.01 * gradient.sign(), rtol=1e-4)
    assert last not in inside
