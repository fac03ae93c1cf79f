"""Friedman's functions: points, the two forms of the loss, and the study."""

import pytest
import torch
from sklearn.datasets import make_friedman1
from torch.func import vmap

from benchmarks.problems import friedman
from benchmarks.problems.friedman import Friedman, FriedmanRun, gaussian_process, points

from .conftest import reported


def test_points_are_standardised_over_those_to_learn_from():
    (x, y), (test, values) = points("friedman1", 400, 3)
    assert torch.cat([x, y], 1).mean(0).abs().max() < 1e-12
    assert (torch.cat([x, y], 1).var(0, unbiased=False) - 1).abs().max() < 1e-12
    _, wanted = make_friedman1(n_samples=400 + len(test), random_state=3)
    assert values.ravel().numpy() * wanted[:400].std() + wanted[:400].mean() == pytest.approx(wanted[400:])
    assert not torch.equal(test.mean(0), torch.zeros(10, dtype=torch.float64))


@pytest.mark.parametrize(("optimizer", "count"), [("adam", 50), ("lbfgs", 80)])
def test_terms_are_half_the_loss_of_the_points_that_a_step_reads(optimizer, count, monkeypatch):
    monkeypatch.setattr(friedman, "BATCH", 50)
    run = FriedmanRun("", "none", optimizer=optimizer, points=80)
    batch, single = Friedman(run), Friedman(run)
    model, ((residual, x, y),) = batch.model(), single.terms()
    assert len(x) == len(y) == count
    half = vmap(lambda *sample: residual(model, *sample))(x, y).square().mean() / 2
    assert batch.loss(model, None).item() == pytest.approx(2 * half.item(), rel=1e-12)


def test_process_has_learned_more_from_more_points():
    few, many = (gaussian_process("friedman2", count, 1)["error"][0] for count in (20, 100))
    assert many < 0.2 * few < 0.2


def test_lowest_error_is_bold_and_its_row_first(tmp_path):
    def run(optimizer, error, count=30):
        settings = {"method": "none", "optimizer": optimizer, "data_set": "friedman1", "points": count, "steps": 2}
        return {"settings": settings, "error": [1.0, error], "seconds": [0.0, 0.5]}

    results = [run("adam", 0.2), run("soap", None), run("lbfgs", 0.1), run("adam", 0.01, 90), run("lbfgs", 0.03, 90)]
    rows = [line for line in reported(tmp_path, "friedman", results)["name"].splitlines() if line.startswith("| ")]
    assert rows[2:] == ["| LBFGS | **0.1** | 0.03 |", "| Adam | 0.2 | **0.01** |", "| SOAP | diverged |  |"]
