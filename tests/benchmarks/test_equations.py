"""Nonlinear equations: their solutions, their two forms of the loss, and the study."""

import math
from dataclasses import replace

import pytest
import torch
from torch.func import vmap

from adiv_optim import GaussNewton
from benchmarks.__main__ import main
from benchmarks.problems.equations import EQUATIONS, POINTS, NonlinearRun, Solver
from benchmarks.train import DERIVATIVES, Problem, train


def by_autograd(equation, u, x):
    """The residual of a function, by two reverse passes."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(u(x).sum(), x, create_graph=True)
    second = sum(
        weight * torch.autograd.grad(first[:, k].sum(), x, retain_graph=True, allow_unused=True)[0][:, k]
        for k, weight in enumerate(equation.weights)
    )
    return equation.residual(u(x), first, second)


@pytest.mark.parametrize("name", EQUATIONS)
def test_solution_has_no_residual(name):
    equation, problem = EQUATIONS[name], Solver(NonlinearRun("", "none", equation=name))
    x = problem.draw(200, torch.Generator().manual_seed(0))
    assert by_autograd(equation, equation.solution, x).abs().max() < 1e-10
    wrong = by_autograd(equation, lambda x: equation.solution(x) + 0.1 * x.prod(-1) ** 2, x)
    assert wrong.abs().max() > 1e-2


def test_initial_values_are_the_wave_and_the_gaussian():
    x = torch.tensor([[math.pi, 0.0], [math.pi / 4, 0.0]], dtype=torch.float64)
    assert EQUATIONS["reaction"].solution(x).tolist() == pytest.approx([1.0, math.exp(-4.5)], abs=1e-14)
    x = torch.tensor([[0.3, 0.3], [1.0, 0.0]], dtype=torch.float64)
    assert EQUATIONS["burgers"].solution(x).tolist() == pytest.approx([1.0, 1 - math.tanh(10)], abs=1e-14)


@pytest.mark.parametrize("inner", POINTS)
@pytest.mark.parametrize("name", EQUATIONS)
def test_loss_of_a_batch_is_that_of_the_terms(name, inner):
    run = NonlinearRun("", "none", equation=name, inner=inner)
    batch, single = Solver(run), Solver(run)
    model = batch.model()
    whole = batch.loss(model, None).item()
    terms = single.terms()
    assert [len(term[1]) for term in terms] == [inner, POINTS[inner]]
    parts = [vmap(lambda *sample, r=r: r(model, *sample))(*tensors).square().mean() / 2 for r, *tensors in terms]
    assert whole == pytest.approx(sum(parts).item(), rel=1e-12)
    assert whole != pytest.approx(parts[0].item(), rel=1e-3)  # either term alone is another number
    assert GaussNewton(model).step(terms).item() == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("name", EQUATIONS)
def test_every_side_has_its_share_of_points_within_the_domain(name):
    problem = Solver(NonlinearRun("", "none", equation=name))
    (inner, sides), (low, high) = problem.points(), torch.tensor(problem.equation.domain, dtype=torch.float64).T
    assert all(((low <= points) & (points <= high)).all() for points in (inner, sides))
    for coordinate, value in problem.equation.sides:
        assert (sides[:, coordinate] == value).sum() == 60 // len(problem.equation.sides)
    assert not torch.equal(inner, problem.points()[0])


def test_gauss_newton_trains_without_a_rate_and_others_with_rows_of_derivatives():
    run = NonlinearRun("", "none", optimizer="gauss-newton", width=8, steps=15)
    assert "lr" not in run.settings()
    solved = train(run, Solver(run)).error
    assert solved[-1] < 0.5 * solved[0]
    whitened = NonlinearRun("", "whitened", damping=0.01, lr=0.01, width=8, steps=5)
    runs = [replace(whitened, rows=rows) for rows in (None, DERIVATIVES)]
    plain, counted = (train(run, Solver(run)).error for run in runs)
    assert plain[0] == counted[0]
    assert plain[-1] != counted[-1]


def test_problem_without_terms_refuses_gauss_newton():
    with pytest.raises(ValueError, match="has no terms, which GaussNewton needs"):
        Problem.terms(Solver(NonlinearRun("", "none")))


def test_study_is_reported(tmp_path, capsys):
    command = ["equations", "--trials", "1", "--steps", "1", "--seeds", "2", "--equation", "burgers", "--width", "20"]
    assert main([*command, "--threads", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Burgers' travelling wave, network 2-20-20-20-1, 1 steps" in printed
    assert all(f"| {arm} |" in printed for arm in ("GaussNewton", "SOAP", "Muon", "Adam"))
