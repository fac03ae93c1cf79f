"""The study of networks without normalisers: its search, and what its runs record."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.core import tune
from benchmarks.core.store import Store
from benchmarks.problems.language import TextRun, Trainer, build_model, build_optimizers, train
from benchmarks.studies.norm_free import COARSE, Arm, search
from examples import gpt as text

RUN = TextRun(text.DEFAULT, "adamw", "layernorm", 1e-3, steps=4, preset="tiny")


def least_at(best):
    return lambda lr: abs(math.log(lr / best)) if lr < 1 else None


@pytest.mark.parametrize(
    ("loss", "method", "best"),
    [
        *((least_at(best), "adamw", best) for best in (1e-2, 3e-1, 3e-4)),
        (least_at(5e-3), "muon", 5e-3),  # whose rows have rates between
        (least_at(5e-3), "adamw", 3e-3),
        (lambda lr: None if lr > 3e-3 else 1.0 / lr, "adamw", 3e-3),  # larger rates diverge
    ],
    ids=["inside", "highest", "lowest", "muon", "adamw", "diverged"],
)
def test_search_goes_on_until_the_best_rate_on_the_ladder_of_its_method_is_no_edge(
    loss, method, best, tmp_path, monkeypatch
):
    """The best rate is chosen, and both of its neighbours on the ladder were tried."""
    tried, store = [], Store(tmp_path / "results.jsonl", "norm-free")

    def run_all(runs, kind, store, part, download):
        for run in runs:
            if not store.has(run.key(part)):
                tried.append(run.lr)
                about = {"settings": run.settings(), "environment": {"host": ""}}
                store.add(run.key(part), {"part": part, "score": loss(run.lr), **about})

    monkeypatch.setattr(tune, "run_all", run_all)
    (chosen,) = search([Arm("none", 1.0, method)], RUN, COARSE, store)
    assert (chosen.lr, chosen.norm, chosen.embedding_deviation, chosen.method) == (best, "none", 1.0, method)
    assert len(tried) == len(set(tried))
    if method == "adamw":
        place = COARSE[0].index(best)
        assert {3e-3, 1e-2, 3e-2, *COARSE[0][max(0, place - 1) : place + 2]} <= set(tried)


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


def test_embeddings_are_drawn_as_asked_and_nothing_else_changes():
    run = TextRun("t", "adamw", "none", 1e-2, preset="tiny")
    plain, wide = (build_model(replace(run, embedding_deviation=deviation), 11) for deviation in (None, 1.0))
    for (name, p), q in zip(plain.named_parameters(), wide.parameters(), strict=True):
        assert torch.allclose(q, 50 * p if name.endswith("embedding.weight") else p), name


def test_gradients_are_cut_to_the_norm(sample):
    run = TextRun(text.DEFAULT, "sgd", "none", 1e-2, preset="tiny", clip=1e-3)
    trainer = Trainer(run, sample)
    trainer.step(1, sample.train[:36].view(4, 9))
    norms = [p.grad.norm() for p in trainer.model.parameters()]
    assert torch.stack(norms).norm() == pytest.approx(1e-3, rel=1e-3)


def test_sizes_are_those_of_the_residual_stream_and_the_logits(sample):
    run = TextRun(text.DEFAULT, "adamw", "none", 1e-9, steps=1, preset="tiny", embedding_deviation=1.0)
    rms = train(run, sample).rms
    assert len(rms) == 3  # before its one block, after it, logits
    assert rms[0] == pytest.approx(math.sqrt(2), rel=0.1)  # a token and a position, of variance 1 each
    assert rms[2] < 0.2
