"""Coordinate networks and networks that solve equations: problems, optimizers, the search, and comparisons."""

import math

import pytest
import torch
from torch import nn

from benchmarks.core.arms import compared_by
from benchmarks.core.tune import proposals
from benchmarks.digests.dampings import regrets
from benchmarks.optimizers import Muon
from benchmarks.problems import pictures, regression
from benchmarks.problems.equations import EquationRun, Solver
from benchmarks.problems.pictures import CoordinateRun, Fit, psnr
from benchmarks.studies import fourier
from benchmarks.train import FieldRun, carried, train


def searched(loss, start, trials):
    tried = {}
    while new := proposals(start, tried, trials):
        tried |= {point: loss(point) for point in new}
    return tried


def test_search_finds_the_best_rate_and_damping_within_its_trials_and_goes_on_until_the_best_rate_is_inside():
    tried = searched(lambda point: (point[0] + 6) ** 2 + (point[1] + 11) ** 2, (-16, -8), 30)
    assert len(tried) == 30
    assert min(tried, key=tried.get) == (-6, -11)
    rates = sorted(point[0] for point in searched(lambda point: abs(point[0] - 40), (0,), 3))
    assert len(rates) > 3
    assert rates[0] < 40 < rates[-1]


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
    assert {squares[crop][0] for crop in fourier.TUNED_ON}.isdisjoint(squares[crop][0] for crop in fourier.SHOWN)
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


def test_features_have_the_deviation_of_their_run():
    runs = [CoordinateRun("", "none", network="fourier", deviation=deviation) for deviation in (None, 6.0)]
    plain, wide = (Fit(run).model() for run in runs)
    assert torch.equal(wide[0].projections, 2 * plain[0].projections)


def by_autograd(problem, u, x):
    """What `carried` returns, by two reverse passes."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(u(x).sum(), x, create_graph=True)
    seconds = [torch.autograd.grad(first[:, k].sum(), x, retain_graph=True)[0][:, k] for k in range(2)]
    return u(x), first, sum(c * second for c, second in zip(problem.equation.weights, seconds, strict=True))


@pytest.mark.parametrize("equation", ["poisson", "heat"])
def test_derivatives_carried_forward_are_those_of_two_reverse_passes(equation):
    problem = Solver(EquationRun("", "none", equation=equation))
    model, x = problem.model(), torch.rand(50, 2, dtype=torch.float64)
    counted = []
    found = carried(model, x, problem.equation.weights, lambda layer, rows: counted.append((layer, rows)))
    wanted = by_autograd(problem, lambda x: model(x).squeeze(-1), x)
    carried_along = (each[:, 0] for each in found)  # of the one output
    assert all(torch.allclose(*pair, rtol=0, atol=1e-12) for pair in zip(carried_along, wanted, strict=True))
    assert wanted[2].abs().max() > 1e-3
    assert [layer for layer, _ in counted] == [layer for layer in model if isinstance(layer, nn.Linear)]
    # The rows of the second layer are the derivatives of what it reads.
    within = by_autograd(problem, lambda x: model[:2](x)[:, 5], x)
    assert torch.allclose(counted[1][1][:, :2, 5], within[1], atol=1e-12)
    assert torch.allclose(counted[1][1][:, 2, 5], within[2], atol=1e-12)


@pytest.mark.parametrize("optimizer", ["adam", "muon", "soap", "lbfgs"])
def test_every_optimizer_lowers_the_error(optimizer):
    lr, steps = (1.0, 2) if optimizer == "lbfgs" else (0.01, 8)  # of which each evaluates the loss many times
    run = EquationRun("", "none", optimizer=optimizer, lr=lr, steps=steps, draws="once")
    history = train(run, Solver(run))
    assert history.error[-1] < history.error[0]
    assert history.steps[-1] == steps
    assert history.seconds == sorted(history.seconds)


def test_run_of_seconds_ends_after_them_and_one_that_breaks_down_says_so():
    run = EquationRun("", "none", lr=1e-3, steps=None, seconds=0.2)
    assert 0.2 <= train(run, Solver(run)).seconds[-1] < 2
    run = CoordinateRun("", "none", optimizer="sgd", lr=1e9, steps=60)
    assert train(run, Fit(run)).error[-1] is None
    with pytest.raises(ValueError, match="a run has one of them"):
        FieldRun("", "none", steps=3, seconds=1.0)


def test_time_is_drawn_where_one_computer_ran_all_arms():
    here, there = ({"environment": {"processor": name}} for name in ("here", "there"))
    assert list(compared_by([here, here])) == ["steps", "seconds"]
    assert list(compared_by([here, there])) == ["steps"]


def test_spread_of_tuning_is_that_of_searches_on_halves_of_the_crops():
    first, second, third, fourth = fourier.TUNED_ON
    level = dict.fromkeys(fourier.TUNED_ON, 20.0)
    assert fourier.tuning_spread({"a": level, "b": dict.fromkeys(level, 10.0)}) == 0
    # Crops 1 and 2 choose b, whose mean is 1 lower; 3 and 4 choose a, and so do the halves of the other two ways.
    b = {first: 21.0, second: 21.0, third: 17.0, fourth: 17.0}
    assert fourier.tuning_spread({"a": level, "b": b}) == pytest.approx(1 / 3)


def test_regret_of_a_damping_is_at_its_best_rate_against_the_best_of_its_search():
    def trial(damping, lr, score, **more):
        return {
            "settings": {"method": "whitened", "optimizer": "adam", "damping": damping, "lr": lr, **more},
            "score": score,
        }

    trials = [
        trial(0.1, 0.01, 5.0), trial(0.1, 0.03, 4.0), trial(0.32, 0.01, 7.0), trial(0.32, 0.03, None),
        trial(0.1, 0.01, 1.0, network="wide"), trial(1.0, 0.01, 0.5, network="wide"),
        trial(1.0, 0.01, 0.0, method="none"),
    ]  # fmt: skip
    searches = [search.dropna().to_dict() for _, search in regrets(trials, float).loc["Adam"].iterrows()]
    assert searches == [{-8: 0.0, -4: 3.0}, {-8: 0.5, 0: 0.0}]
    halves = [trial(0.1, 0.01, 1.0, crop=crop) for crop in (0, 1)] + [trial(1.0, 0.01, 0.0, crop=0)]
    assert regrets(halves, float).empty  # of the second damping one of two runs is there


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
