"""The study of networks without normalisers: its search, its table, and what its runs record."""

import math

import pytest
import torch
from scipy import stats

from benchmarks.core import tune
from benchmarks.core.store import Store
from benchmarks.language.run import TextRun, build_optimizers
from benchmarks.language.train import Trainer, build_model, train
from benchmarks.studies.norm_free import COARSE, Arm, report, search
from examples import gpt as text

RUN = TextRun(text.DEFAULT, "adamw", "layernorm", 1e-3, steps=4, preset="tiny")


@pytest.fixture(scope="module")
def sample():
    return text.split(text.python_reference()[:20_000])


@pytest.mark.parametrize("best", [1e-2, 3e-2, 3e-1, 3e-4])
def test_search_goes_on_until_the_best_rate_is_no_edge(best, tmp_path, monkeypatch):
    """A loss that is least at one rate: that rate is found, and both of its neighbours on the ladder were tried."""
    tried = []

    def run_all(runs, kind, store, part, download):
        for run in runs:
            if not store.has(run.key(part)):
                tried.append(run.lr)
                loss = abs(math.log(run.lr / best)) if run.lr < 1 else None
                about = {"settings": run.settings(), "environment": {"host": ""}}
                store.add(run.key(part), {"part": part, "score": loss, **about})

    monkeypatch.setattr(tune, "run_all", run_all)
    (chosen,) = search([Arm("none", 1.0, "muon")], RUN, COARSE, Store(tmp_path / "results.jsonl", "norm-free"))
    assert (chosen.lr, chosen.norm, chosen.embedding_deviation, chosen.method) == (best, "none", 1.0, "muon")
    place = COARSE[0].index(best)
    assert {3e-3, 1e-2, 3e-2, *COARSE[0][max(0, place - 1) : place + 2]} <= set(tried)
    assert len(tried) == len(set(tried))


def test_diverged_runs_are_never_chosen(tmp_path, monkeypatch):
    def run_all(runs, kind, store, part, download):
        for run in runs:
            score = None if run.lr > 3e-3 else 1.0 / run.lr
            about = {"settings": run.settings(), "environment": {"host": ""}}
            store.add(run.key(part), {"part": part, "score": score, **about})

    monkeypatch.setattr(tune, "run_all", run_all)
    (chosen,) = search([Arm("none", 1.0, "muon")], RUN, COARSE, Store(tmp_path / "results.jsonl", "norm-free"))
    assert chosen.lr == 3e-3


LOSSES = {("layernorm", None): [2.0, 2.1, 2.05], ("none", 1.0): [1.9, 2.02, 1.99]}


def add(store, losses, steps=4):
    """Runs of some losses, by seed."""
    place = {"processor": "p", "gpu": None, "threads": 1, "torch": "2"}
    for (norm, drawn), found in losses.items():
        for seed, loss in enumerate(found, start=1):
            run = TextRun("t", "adamw", norm, 1e-2, seed=seed, steps=steps, preset="tiny", embedding_deviation=drawn)
            size = {"layers": 1, "width": 16, "heads": 2, "context": 8, "batch_size": 4}
            result = {"size": size, "validation_loss": [4.0, loss], "test_loss": loss + 0.1, "diverged": False}
            settings = {"settings": run.settings(), "environment": place, "rms": [1.0, 3.0, 2.0]}
            store.add(run.key(), {**result, **settings})


def test_table_has_means_and_welchs_p_by_hand(tmp_path):
    store, losses = Store(tmp_path / "results.jsonl", "norm-free"), LOSSES
    add(store, losses)
    section = report(store, "norm-free", tmp_path)["norm-free"].text
    p = stats.ttest_ind(*losses.values(), equal_var=False).pvalue
    against = f"-0.080 ({p:.2g})"
    row = "| no normaliser | 1 | AdamW | 0.01 | 3 | 1.970 ± 0.036 | 2.070 ± 0.036 |"
    assert f"{row} {against} | {against} |" in section
    assert "| 1 to 3 | 2 |" in section
    assert "seeds 1 to 3" in section
    add(store, {("none", 1.0): [1.5, 1.6]}, steps=8)  # whose losses are no seeds of the others
    longer = report(store, "norm-free", tmp_path)
    assert longer["norm-free-1"].text == section
    assert "| 2 | 1.550 ± 0.050 |" in longer["norm-free-2"].text


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
    one, other = (
        build_model(TextRun("t", "adamw", "none", 1e-2, preset="tiny", embedding_deviation=drawn), 11)
        for drawn in (None, 1.0)
    )
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
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
