"""An operator and flows: data, densities, rates of their own, and the study."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch.optim import Adam

from benchmarks.problems import surrogates as problems
from benchmarks.problems.surrogates import Burgers, Density, RealNVP, SurrogateRun
from benchmarks.train import train

from .conftest import reported


@pytest.fixture
def few(monkeypatch):
    solve = problems.burgers.__wrapped__
    monkeypatch.setattr(problems, "TRAIN", 25)
    monkeypatch.setattr(problems, "TEST", 5)
    monkeypatch.setattr(problems, "burgers", lambda seed: solve(seed, 300))


def test_functions_solve_burgers_equation(few):
    """The exact solution is that of Cole and Hopf, u = −2ν φₓ / φ, where φ solves the heat equation."""
    first, last = (u.double().numpy() for u in problems.burgers(0))
    size, viscosity = 4096, problems.VISCOSITY
    k = 2j * np.pi * np.arange(size // 2 + 1)
    spectrum = np.zeros((len(first), len(k)), complex)
    spectrum[:, :64] = np.fft.rfft(first)[:, :64] * size / 128
    integral = np.fft.irfft(np.divide(spectrum, k, out=np.zeros_like(spectrum), where=k != 0))
    potential = np.fft.rfft(np.exp(-integral / (2 * viscosity))) * np.exp(viscosity * k**2)
    exact = -2 * viscosity * np.fft.irfft(k * potential) / np.fft.irfft(potential)
    assert np.abs(last - exact[:, :: size // 128]).max() < 1e-3
    assert np.abs(last).max() > 0.1


def test_modes_have_a_rate_of_their_own_and_begin_as_without(few):
    runs = [SurrogateRun("", "none", spectral_rate=rate) for rate in (None, 4.0)]
    moved, starts = [], []
    for problem in map(Burgers, runs):
        model = problem.model()
        spectral = model.modes[0]
        before = spectral.rate * spectral.weight.detach().clone()
        starts.append(model(problem.first[0]))
        problem.loss(model, None).backward()
        Adam(model.parameters(), lr=1e-3).step()
        moved.append((spectral.rate * spectral.weight.detach() - before).abs().median().item())
    assert torch.allclose(*starts, atol=1e-5)
    assert moved == pytest.approx([1e-3, 4e-3], rel=1e-2)


@pytest.mark.parametrize("norm", ["none", "layernorm"])
def test_density_of_a_flow_integrates_to_1(norm):
    torch.manual_seed(0)
    flow, line = RealNVP(2, norm, None).double(), torch.linspace(-12, 12, 601, dtype=torch.float64)
    with torch.no_grad():
        density = flow(torch.cartesian_prod(line, line)).exp()
    assert density.sum().item() * (line[1] - line[0]).item() ** 2 == pytest.approx(1, abs=1e-3)
    assert density.max() > 1.2 / (2 * np.pi)


@pytest.mark.parametrize("norm", ["none", "columns"])
def test_error_is_in_units_of_the_rows_as_they_were(norm):
    """A flow that is the identity has the density of a normal distribution, with white columns that of the rows."""
    problem = Density(SurrogateRun("", "none", norm=norm, data_set="patches", start="zero"))
    rows = problem.test.double().numpy() @ np.linalg.inv(problem.map) + problem.mean
    covariance = np.linalg.inv(problem.map @ problem.map.T)
    density = multivariate_normal(problem.mean, covariance).logpdf(rows)
    assert problem.error(problem.model()) == pytest.approx(-density.mean(), rel=1e-5)
    drawn = problem.rows(5000, False).double().numpy()
    assert np.abs(np.diag(np.cov(drawn.T)) - 1).max() < 0.3
    assert (np.abs(np.corrcoef(drawn.T) - np.eye(63)).max() < 0.2) == (norm == "columns")


def test_squares_that_test_are_of_the_right_quarter():
    left, right = (problems._windows(are_to_test) for are_to_test in (False, True))
    assert len(left) == 2 * (427 - 7) * (480 - 7)
    assert len(right) == 2 * (427 - 7) * (160 - 7)
    x = problems.patches(np.random.default_rng(0), 1000, True)
    assert x.shape == (1000, 63)
    assert np.abs(x).max() < 1


@pytest.mark.parametrize(("data_set", "norm"), [("burgers", "layernorm"), ("moons", "none")])
def test_every_problem_is_learned(data_set, norm, few):
    run = SurrogateRun("", "whitened", norm=norm, data_set=data_set, lr=1e-2, steps=12, damping=0.1)
    problem = Burgers(run) if data_set == "burgers" else Density(run)
    with pytest.warns(UserWarning, match="less than half") if data_set == "burgers" else nullcontext():
        history = train(run, problem)
    assert history["error"][-1] < history["error"][0]


def test_cells_are_the_median_and_range_over_seeds_of_the_settings_chosen_last(tmp_path):
    def run(seed, error, lr=0.01):
        settings = {"norm": "none", "optimizer": "adam", "method": "none", "data_set": "moons", "steps": 4}
        measured = {"error": [1.0, error], "seconds": [0.0, 0.4], "steps": [0, 4]}
        return {"settings": {**settings, "lr": lr, "seed": seed}, **measured}

    runs = [run(1, 0.5, lr=0.1), run(1, 0.5), run(2, None), run(3, 0.6)]
    assert "| Adam | 0.6 (0.5 to inf) |" in reported(tmp_path, "surrogates", runs)["name"]
