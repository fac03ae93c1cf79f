"""Differential equations: their solutions, their two forms of the loss, rivals of GaussNewton, and the study."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.func import hessian, jacrev, vmap

from adiv_optim import GaussNewton
from benchmarks.core.store import Store
from benchmarks.core.tables import grouped
from benchmarks.optimizers import SPRING, AdamThenLBFGS, LeastSquares, NielsensDamping, SelfScaledBFGS, linearized
from benchmarks.problems import equations
from benchmarks.problems.equations import EQUATIONS, POINTS, EquationRun, Fields, Solver
from benchmarks.studies import equations as study
from benchmarks.train import DERIVATIVES, train

EXACT = [name for name in EQUATIONS if name != "allen-cahn"]


def residual_of(name, solution, count=200):
    """The residual of a function of points, by torch.func."""
    equation, problem = EQUATIONS[name], Solver(EquationRun("", "none", equation=name))
    x = problem.draw(count, torch.Generator().manual_seed(0))
    second = vmap(hessian(solution))(x).diagonal(dim1=-2, dim2=-1) @ torch.tensor(equation.weights, dtype=torch.float64)
    unknown = torch.tensor(equation.unknown or 0.0, dtype=torch.float64)
    return equation.residual(Fields(x, solution(x), vmap(jacrev(solution))(x), second, unknown))


@pytest.mark.parametrize("name", EXACT)
def test_solution_has_no_residual(name):
    solution = EQUATIONS[name].solution
    assert residual_of(name, solution).abs().max() < 1e-10
    assert residual_of(name, lambda x: solution(x) + 0.1 * x.prod(-1, keepdim=True) ** 2).abs().max() > 1e-2


def test_reference_of_allen_and_cahn_solves_the_equation_and_more_polynomials_do_not_change_it(monkeypatch):
    x, t = torch.linspace(-0.99, 0.99, 41, dtype=torch.float64), torch.full((41,), 0.7, dtype=torch.float64)
    u = lambda dx, dt: EQUATIONS["allen-cahn"].solution(torch.stack([x + dx, t + dt], -1))[..., 0]  # noqa: E731
    h, k = 2e-4, 1e-4
    slope, curvature = (u(0, k) - u(0, -k)) / (2 * k), (u(h, 0) - 2 * u(0, 0) + u(-h, 0)) / h**2
    reaction = 5 * (u(0, 0) - u(0, 0) ** 3)
    assert (slope - 1e-4 * curvature - reaction).abs().max() < 1e-3 * reaction.abs().max()
    assert (slope - 2e-4 * curvature - reaction).abs().max() > 1e-2 * reaction.abs().max()
    start = EQUATIONS["allen-cahn"].solution(torch.stack([x, 0 * t], -1))[..., 0]
    assert torch.allclose(start, x**2 * (math.pi * x).cos(), atol=1e-4)
    before = u(0, 0)
    monkeypatch.setattr(equations, "MODES", 2048)
    assert (u(0, 0) - before).abs().max() < 1e-7


@pytest.mark.parametrize("name", EQUATIONS)
def test_loss_of_a_batch_is_that_of_the_terms(name):
    run = EquationRun("", "none", equation=name, hidden=9)
    batch, single = Solver(run), Solver(run)
    model = batch.model()
    whole, terms = batch.loss(model, None).item(), single.terms()
    assert len(terms[0][1]) == 300
    assert sum(len(term[1]) for term in terms[1:]) == (200 if EQUATIONS[name].unknown else POINTS[300])
    parts = [vmap(lambda *sample, r=r: r(model, *sample))(*tensors).square().mean() / 2 for r, *tensors in terms]
    assert whole == pytest.approx(sum(parts).item(), rel=1e-12)
    assert whole != pytest.approx(sum(parts[1:]).item(), rel=1e-6)
    assert GaussNewton(model).step(terms).item() == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("name", EQUATIONS)
def test_points_lie_in_the_domain_and_every_side_has_its_share(name):
    problem = Solver(EquationRun("", "none", equation=name))
    low, high = torch.tensor(problem.equation.domain, dtype=torch.float64).T
    batch, again = problem.batch(), problem.batch()
    for points in (batch.inside, batch.given, batch.flat):
        assert ((low <= points) & (points <= high)).all()
    assert not torch.equal(batch.inside, again.inside)
    for coordinate, value, is_slope in problem.equation.sides:
        points = batch.flat if is_slope else batch.given
        assert (points[:, coordinate] == value).sum() >= 60 // len(problem.equation.sides)
    once = Solver(EquationRun("", "none", equation=name, draws="once"))
    assert once.batch() is once.batch()


def test_observations_stay_and_have_one_percent_of_noise():
    problem = Solver(EquationRun("", "none", equation="viscosity"))
    first, second = problem.batch(), problem.batch()
    assert first.given is second.given
    exact = problem.equation.solution(first.given)
    noise = (first.values - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.008 < noise < 0.012
    assert problem.error(problem.model()) == pytest.approx(9.0)  # 0.5 for 0.05


def test_counted_rows_change_a_run():
    whitened = EquationRun("", "whitened", damping=0.01, lr=0.01, hidden=8, steps=5)
    runs = [replace(whitened, rows=rows) for rows in (None, DERIVATIVES)]
    plain, counted = (train(run, Solver(run))["error"] for run in runs)
    assert plain[0] == counted[0]
    assert plain[-1] != counted[-1]


def quadratic(matrix, wanted):
    """A model of few numbers, and terms and closure of |Ax − b|²/2n."""
    model = torch.nn.Linear(matrix.shape[1], 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)

    def closure():
        model.zero_grad()
        loss = (model(matrix)[:, 0] - wanted).square().mean() / 2
        loss.backward()
        return loss

    return model, [(lambda model, row, value: model(row)[0] - value, matrix, wanted)], closure


@pytest.fixture
def system():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(30, 6, dtype=torch.float64, generator=generator) * torch.logspace(0, -1, 6).double()
    solution = torch.randn(6, dtype=torch.float64, generator=generator)
    return matrix, matrix @ solution, solution


@pytest.mark.parametrize(
    ("make", "steps", "takes_terms", "precision"),
    [
        (LeastSquares, 1, True, 1e-10),
        (SelfScaledBFGS, 60, False, 1e-6),
        (lambda model: AdamThenLBFGS(model, 0.1, 5), 40, False, 1e-5),
        (lambda model: SPRING(model, 0.5, 1e-8), 60, True, 1e-6),
        (NielsensDamping, 20, True, 1e-6),
    ],
    ids=["least squares", "self-scaled BFGS", "Adam, then LBFGS", "SPRING", "Levenberg–Marquardt"],
)
def test_rivals_solve_a_least_squares_problem(system, make, steps, takes_terms, precision):
    matrix, wanted, solution = system
    model, terms, closure = quadratic(matrix, wanted)
    optimizer = make(model)
    for _ in range(steps):
        optimizer.step(terms if takes_terms else closure)
    assert (model.weight[0] - solution).abs().max() < precision * solution.abs().max()


def test_random_features_take_the_step_of_gauss_newton_where_newtons_does_not_halve_the_residual():
    run = EquationRun("", "none", equation="reaction", optimizer="random-features", hidden=60, inner=300, lr=8.0)
    problem = Solver(replace(run, draws="once"))
    model, terms = problem.model(), problem.terms()
    other, start = deepcopy(model), deepcopy(model)
    LeastSquares(model).step(terms)
    GaussNewton(other).step(terms)
    assert torch.equal(model[2].weight, other[2].weight)
    r, jacobian = linearized(start, terms)
    start[2].weight.data -= torch.linalg.lstsq(jacobian, r[:, None]).solution[None, :-1, 0]
    start[2].bias.data -= torch.linalg.lstsq(jacobian, r[:, None]).solution[-1:, 0]
    assert linearized(start, terms)[0].norm() > r.norm() / 2
    assert not torch.allclose(model[2].weight, start[2].weight, rtol=0.1)


def test_self_scaled_bfgs_meets_the_secant_equation(system):
    matrix, wanted, _ = system
    model, _, closure = quadratic(matrix, wanted)
    optimizer = SelfScaledBFGS(model)
    for _ in range(4):
        before = closure(), model.weight.detach().clone(), model.weight.grad.clone()
        optimizer.step(closure)
        closure()
        s, y = model.weight.detach() - before[1], model.weight.grad - before[2]
        assert torch.allclose(torch.from_numpy(optimizer.inverse) @ y[0], s[0], atol=1e-12)
    assert not torch.allclose(torch.eye(6).double() @ y[0], s[0], atol=1e-3)


def test_self_scaled_bfgs_halves_its_step_where_the_wolfe_search_finds_none():
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = SelfScaledBFGS(model)

    def kink():  # its slope has one size on either side, so that the curvature condition holds nowhere
        optimizer.zero_grad()
        loss = 1.25 * (model.weight - 0.75).abs().sum()
        loss.backward()
        return loss

    optimizer.step(kink)
    assert model.weight.item() == 0.6875
    assert optimizer.inverse == 0.125  # s / y


def test_points_are_drawn_now_and_then():
    problem = Solver(EquationRun("", "none", optimizer="self-scaled-bfgs", draws="every 500"))
    first = problem.batch(1)
    assert problem.batch(500) is first
    second = problem.batch(501)
    assert not torch.equal(second.inside, first.inside)
    assert problem.batch(1000) is second


def test_of_a_step_that_comes_too_late_the_error_of_before_counts(monkeypatch):
    run = EquationRun("", "none", optimizer="nielsen", hidden=5, seconds=3.0, steps=None)
    two = train(replace(run, seconds=None, steps=2), Solver(run))
    clock = iter([0.0, 0.1, 0.0, 0.01, 0.0, 9.0])  # two steps of 0.11 seconds, and one of nine
    monkeypatch.setattr("benchmarks.train.time.process_time", lambda: next(clock))
    found = train(run, Solver(run))
    assert [each[-1] for each in found.values()] == [2, pytest.approx(0.11), two["error"][-1]]


def test_spring_without_momentum_is_the_damped_step(system):
    matrix, wanted, _ = system
    model, terms, _ = quadratic(matrix, wanted)
    SPRING(model, 1.0, 0.1, momentum=0.0).step(terms)
    scaled = matrix / 30**0.5
    step = torch.linalg.solve(scaled.T @ scaled + 0.1 * torch.eye(6).double(), scaled.T @ wanted / 30**0.5)
    assert torch.allclose(model.weight[0], step, atol=1e-12)


@pytest.mark.parametrize("rows", [3, 30])
def test_nielsens_damping_falls_to_a_third_of_itself_where_the_model_is_exact(system, rows):
    matrix, wanted = (each[:rows] for each in system[:2])
    model, terms, _ = quadratic(matrix, wanted)
    scaled, optimizer = matrix / rows**0.5, NielsensDamping(model)
    optimizer.step(terms)
    mu = 1e-3 * scaled.square().sum(0).max()
    step = torch.linalg.solve(scaled.T @ scaled + mu * torch.eye(6).double(), scaled.T @ wanted / rows**0.5)
    assert torch.allclose(model.weight[0], step, rtol=1e-9)
    assert optimizer.mu == pytest.approx(mu.item() / 3)


def test_nielsens_damping_rises_by_2_4_8_until_the_loss_falls():
    model, start = torch.nn.Linear(1, 1, bias=False).double(), 3.0
    torch.nn.init.constant_(model.weight, start)
    optimizer = NielsensDamping(model)
    optimizer.step([(lambda model, x: model(x).atan(), torch.ones(1, 1, dtype=torch.float64))])
    r, slope = math.atan(start), 1 / (1 + start**2)
    tried = [1e-3 * slope**2 * 2 ** (n * (n + 1) / 2) for n in range(20)]
    steps = [r * slope / (slope**2 + mu) for mu in tried]
    first = next(n for n, step in enumerate(steps) if abs(start - step) < start)
    mu, step = tried[first], steps[first]
    gain = (r**2 - math.atan(start - step) ** 2) / (step * (mu * step + r * slope))
    assert first > 1
    assert start - model.weight.item() == pytest.approx(step)
    assert optimizer.mu == pytest.approx(mu * max(1 / 3, 1 - (2 * gain - 1) ** 3))


def test_an_arm_with_nothing_but_points_to_choose_tries_each_count_on_three_seeds(tmp_path):
    store = Store(tmp_path / "equations.jsonl", "equations")
    options = study.EquationOptions(equation="burgers", width=20, trials=10, seeds=1, steps=4)
    for optimizer, seeds in {"gauss-newton": [0, 101, 102], "adam": [0]}.items():
        study._run(replace(options, optimizer=optimizer), store)
        tried = [r for r in store.read("search") if r["settings"]["optimizer"] == optimizer]
        assert len(tried) >= 9
        assert sorted({r["settings"]["seed"] for r in tried}) == seeds
    tried = [r for r in store.read("search") if r["settings"]["optimizer"] == "gauss-newton"]
    errors = {inner: [r["score"] for r in tried if r["settings"].get("inner", 300) == inner] for inner in study.COUNTS}
    (shown,) = (r for r in store.read() if r["settings"]["optimizer"] == "gauss-newton")
    assert shown["settings"]["inner"] == min(errors, key=lambda inner: math.prod(errors[inner]))


def test_an_arm_that_ends_far_above_its_trial_is_run_at_the_next_lower_rates(tmp_path, monkeypatch):
    store, ends = Store(tmp_path / "equations.jsonl", "equations"), {0.1: [0.5, 0.6, None], 0.032: [0.02, 0.2, 0.01]}
    scores = {0.1: 1e-3, 0.32: 9.0, 0.032: 2e-2, 0.01: 3e-2, 0.0032: None}
    first = EquationRun("", "none", optimizer="adam", lr=0.1)

    def run_all(runs, kind, store, **others):
        for run, error in zip(runs, ends[runs[0].lr], strict=True):
            store.add(run.key(), {"settings": run.settings(), "environment": {}, "error": [error]})

    def choose(searches, kind, store, loss, each):
        for rate, score in scores.items():
            run = replace(first, lr=rate)
            line = {"settings": run.settings(), "environment": {}, "part": "search", "score": score}
            store.add(run.key("search"), line)
        return [first]

    monkeypatch.setattr(study, "run_all", run_all)
    monkeypatch.setattr(study, "choose", choose)
    study._run(study.EquationOptions(equation="burgers", optimizer="adam", width=20, seeds=3), store)
    assert [r["settings"]["lr"] for r in store.read()] == 3 * [0.1] + 3 * [0.032]  # 0.02 is near its own trial


def test_runs_are_varied_with_the_settings_that_trials_chose(tmp_path, monkeypatch):
    store = Store(tmp_path / "equations.jsonl", "equations")
    monkeypatch.setattr(study, "SECONDS", 0.4)
    options = study.EquationOptions(equation="burgers", width=20, trials=1, seeds=1)
    for optimizer in ("gauss-newton", "self-scaled-bfgs"):
        study._run(replace(options, optimizer=optimizer), store)
    assert "equations-varied" not in study.report(store, "equations", tmp_path)
    study._run(study.EquationOptions(varied=True), store)
    shown = grouped(store.read(), lambda r: r["settings"]["optimizer"])
    for result in store.read("varied"):
        ways = [result["settings"].items() ^ r["settings"].items() for r in shown[result["settings"]["optimizer"]]]
        allowed = [{("draws", "once"), ("draws", "anew")}, {("draws", "once"), ("draws", "every 500")}]
        assert any(changed in ({("start", "pytorch")}, *allowed) for changed in ways)
        assert math.isfinite(result["score"])
    (table,) = study.report(store, "equations", tmp_path)["equations-varied"].tables
    # By the better of two ways.
    assert [sum(cell.text != "" for cell in row[2:]) for row in table.rows] in ([3, 2], [3, 3])


def test_an_arm_is_tuned_a_second_time_on_another_seed(tmp_path):
    store = Store(tmp_path / "equations.jsonl", "equations")
    options = study.EquationOptions(equation="burgers", optimizer="soap", width=20, trials=4, seeds=2, steps=3)
    study._run(options, store)
    study._run(replace(options, varied=True), store)
    tried, ended = store.read("again-search"), store.read("again")
    assert {r["settings"]["seed"] for r in tried} == {101}
    best = min(tried, key=lambda r: r["score"])["settings"]
    assert [r["settings"] for r in ended] == [best | {"seed": seed, "steps": 3} for seed in (1, 2)]
    caption = study.report(store, "equations", tmp_path)["equations-varied"].parts[-1]
    assert f"and {sum(r['score'] for r in ended) / 2:.1e}." in caption


def test_networks_begin_as_pytorch_draws_them_where_they_are_to():
    torch.manual_seed(1)
    plain = torch.nn.Linear(2, 50).double()
    model = Solver(EquationRun("", "none", seed=1, start="pytorch")).model()
    assert torch.equal(model[0].weight, plain.weight)
    assert not torch.equal(model[0].weight, Solver(EquationRun("", "none", seed=1)).model()[0].weight)
