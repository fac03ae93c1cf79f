"""Coordinate networks and networks that solve equations: problems, optimizers, the search, and comparisons."""

import math

import pytest
import torch
from sklearn.datasets import make_friedman1
from torch import nn
from torch.func import vmap

from benchmarks.digests.dampings import regrets
from benchmarks.optimizers import Muon
from benchmarks.problems import friedman, pictures, regression
from benchmarks.problems.equations import EquationRun, Solver
from benchmarks.problems.friedman import Friedman, FriedmanRun, points
from benchmarks.problems.pictures import CoordinateRun, Fit, psnr
from benchmarks.studies import coordinates
from benchmarks.train import FieldRun, carried, train


def test_muon_steps_along_the_polar_factor_of_the_gradient():
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (4, 6), (6, 4))]  # two are iterated together
    before, gradients = [w.detach().clone() for w in weights], [torch.randn(w.shape) for w in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    Muon(weights, lr=0.1).step()
    for weight, old, gradient in zip(weights, before, gradients, strict=True):
        step = (old - weight.detach()) / (0.1 * 0.2 * 6**0.5)
        u, _, v = torch.linalg.svd(gradient, full_matrices=False)
        assert nn.functional.cosine_similarity(step.flatten(), (u @ v).flatten(), dim=0) > 0.97


def test_crops_do_not_overlap_those_that_trials_learn():
    squares = pictures.CROPS[64]
    assert len(set(squares)) == len(squares) == 16
    trials, shown = ({squares[crop][0] for crop in each} for each in (coordinates.ORDINARY, coordinates.SHOWN))
    assert trials.isdisjoint(shown)
    assert (psnr(4.0), psnr(0.04)) == (0, pytest.approx(20))


def test_errors_of_batches_are_by_running_statistics():
    run = CoordinateRun("", "none", norm="batchnorm", batch_size=64, steps=3)
    problem = Fit(run)
    model = problem.model()
    problem.loss(model, None)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    problem.error(model)
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())
    assert model.training


def test_held_out_pixels_are_every_other_one_and_are_not_learned():
    problem = Fit(CoordinateRun("", "none", held_out=True))
    inputs, colours = pictures.pixels(64, 0)
    learned, judged = ({tuple(point) for point in points.tolist()} for points in (problem.inputs, problem.judged[0]))
    assert len(learned) == len(judged) == 2048
    assert learned | judged == {tuple(point) for point in inputs.tolist()}
    assert tuple(inputs[0].tolist()) in judged
    assert {tuple(inputs[1].tolist()), tuple(inputs[64].tolist())} <= learned  # its neighbours
    black = nn.Linear(2, 3)
    nn.init.zeros_(black.weight)
    nn.init.zeros_(black.bias)
    is_even = torch.arange(64).view(-1, 1).add(torch.arange(64)).flatten() % 2 == 0
    assert math.isclose(problem.error(black), colours[is_even].square().mean().item(), rel_tol=1e-6)


def test_rows_that_count_are_the_derivatives_of_what_a_layer_reads():
    problem, x, counted = Solver(EquationRun("", "none", equation="heat")), torch.rand(50, 2).double(), []
    model, weights = problem.model(), problem.equation.weights
    carried(model, x, weights, lambda layer, rows: counted.append((layer, rows)))
    assert [layer for layer, _ in counted] == [layer for layer in model if isinstance(layer, nn.Linear)]
    _, first, second = carried(model[:2], x, weights)
    assert torch.allclose(counted[1][1], torch.cat([first.mT, second.unsqueeze(1)], 1))


@pytest.mark.parametrize("optimizer", ["adam", "muon", "soap", "lbfgs"])
def test_every_optimizer_lowers_the_error(optimizer):
    lr, steps = (1.0, 2) if optimizer == "lbfgs" else (0.01, 8)  # of which each evaluates the loss many times
    run = EquationRun("", "none", optimizer=optimizer, lr=lr, steps=steps, draws="once")
    history = train(run, Solver(run))
    assert history["error"][-1] < history["error"][0]
    assert history["steps"][-1] == steps
    assert history["seconds"] == sorted(history["seconds"])


def test_run_of_seconds_ends_after_them_and_one_that_breaks_down_says_so():
    run = EquationRun("", "none", lr=1e-3, steps=None, seconds=0.2)
    assert 0.2 <= train(run, Solver(run))["seconds"][-1] < 2
    run = CoordinateRun("", "none", optimizer="sgd", lr=1e9, steps=60)
    assert train(run, Fit(run))["error"][-1] is None
    with pytest.raises(ValueError, match="a run has one of them"):
        FieldRun("", "none", steps=3, seconds=1.0)


def test_regret_is_of_dampings_whose_runs_are_all_there():
    def trial(damping, crop):
        settings = {"method": "whitened", "optimizer": "adam", "damping": damping, "lr": 0.01, "crop": crop}
        return {"settings": settings, "score": 1.0}

    part = [trial(0.1, 0), trial(0.1, 1), trial(1.0, 0)]
    assert regrets(part, float).empty
    assert len(regrets([*part, trial(1.0, 1)], float)) == 1


@pytest.mark.parametrize("data_set", ["friedman1-10000", "diabetes"])
def test_white_columns_are_uncorrelated_over_rows_that_train_and_keep_what_the_columns_say(data_set):
    (plain, values), (held_out, _), _ = regression.rows(data_set, 1, False)
    (white, same), (white_held_out, _), _ = regression.rows(data_set, 1, True)
    identity = torch.eye(white.shape[1])
    assert torch.allclose(white.T @ white / len(white), identity, atol=1e-4)
    assert not torch.allclose(plain.T @ plain / len(plain), identity, atol=0.1)
    assert torch.equal(values, same)
    map_back = torch.linalg.lstsq(white.double(), plain.double()).solution
    assert torch.allclose(white_held_out.double() @ map_back, held_out.double(), atol=1e-4)


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
