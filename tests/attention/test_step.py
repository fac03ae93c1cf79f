"""What the ideal step of attention logits does: solvers, limits and theorems, against dense least squares."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import vjp

from adiv_optim.attention import (
    AttentionIdeal,
    _solve,
    effective_logit_update,
    logits,
)
from adiv_optim.attention._map import LogitMap
from adiv_optim.attention._projections import Projections
from tests.helpers.attention import CONVERGED, EXACT, NAMES, REACHABLE, UNREACHABLE, Case, each_case, flat
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired
from tests.helpers.seeds import manual_seed

pytestmark = pytest.mark.usefixtures("in_float64")

each_reachable = pytest.mark.parametrize("case", REACHABLE.values(), ids=REACHABLE)

each_unreachable = pytest.mark.parametrize("case", UNREACHABLE.values(), ids=UNREACHABLE)

# What the step does


@each_reachable
def test_real_step_moves_every_logit_by_its_own_gradient(case):
    input, parameters, g = case.make()
    before, rate = case.plain(input, parameters), 1e-6

    def deviation(gradients: dict[str, Tensor]) -> float:
        ahead, behind = (
            case.plain(input, {name: p + sign * rate * gradients[name] for name, p in parameters.items()})
            for sign in (-1, 1)
        )
        assert relative_error(ahead, before) > 0
        return relative_error((ahead - behind) / (2 * rate), -g)  # central: the term of second order drops out

    assert deviation(case.step(input, parameters, g, AttentionIdeal(0.0, **CONVERGED))) <= 1e-6
    plain = dict(zip(parameters, vjp(lambda p: case.plain(input, p), parameters)[1](g)[0].values(), strict=True))
    assert deviation(plain) > 0.1
    assert deviation(case.step(input, parameters, g, AttentionIdeal(damping=0.1))) > 1e-2


@each_unreachable
@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_step_is_the_least_squares_solution_of_least_norm(case, damping):
    input, parameters, g = case.make()
    found = flat(case.step(input, parameters, g, AttentionIdeal(damping, **CONVERGED)))
    wanted = flat(case.by_lstsq(input, parameters, g, damping))
    # Without a ridge gelsd and conjugate gradients both lose digits to the condition of J, which is up to 1e3 here.
    tolerance = EXACT if damping else 1e-6
    assert relative_error(found, wanted) <= tolerance
    other = flat(case.by_lstsq(input, parameters, g, damping + 0.01))
    assert relative_error(other, wanted) > 100 * tolerance


def test_sequences_alone_are_each_their_own_least_squares_and_add_up():
    case = Case(sequences=3, tokens=4, head_dim=4)
    input, parameters, g = case.make()
    single = replace(case, sequences=0)
    for damping in (0.0, 1e-2):
        rule = AttentionIdeal(damping, joint=False, **CONVERGED)
        wanted = sum(flat(single.by_lstsq(x, parameters, y, damping)) for x, y in zip(input, g, strict=True))
        assert relative_error(flat(case.step(input, parameters, g, rule)), wanted) <= EXACT
    together = flat(case.step(input, parameters, g, replace(rule, joint=True)))
    assert relative_error(together, wanted) > 0.1


def linearised(case: Case, joint: bool):
    input, parameters, g = case.make()
    given = Projections(input, *(parameters.get(name) for name in NAMES), case.heads, None, case.mask)
    logit_map = LogitMap(input, *given.projected(), given.factor, case.mask, frozenset(parameters), joint)
    return logit_map, logit_map.vector(g)


@paired("case joint", REACHABLE | UNREACHABLE, {"joint": True, "alone": False})
def test_dense_and_iterative_solvers_agree(case, joint, monkeypatch):
    logit_map, right = linearised(case, joint)
    monkeypatch.setattr(_solve, "DENSE_LOGITS", 0)
    for damping in (1e-3, 1.0):
        dense = _solve.dense(logit_map, right, damping)
        iterative = _solve.solve(logit_map, right, AttentionIdeal(damping, **CONVERGED))
        early = _solve.solve(logit_map, right, AttentionIdeal(damping, tolerance=None, max_iterations=2))
        for side, part in dense.items():
            assert relative_error(iterative[side], part) <= EXACT
            assert relative_error(early[side], part) > 100 * EXACT


@each_case
def test_adjoint_is_the_transpose_and_the_mean_eigenvalue_that_of_the_jacobian(case):
    logit_map, right = linearised(case, joint=True)
    parts = {side: torch.randn_like(part) for side, part in logit_map.adjoint(right).items()}
    along = (logit_map.forward(parts) * right).sum()
    against = sum((part * parts[side]).sum() for side, part in logit_map.adjoint(right).items())
    assert (along - against).abs() <= 1e-10 * right.norm() * logit_map.forward(parts).norm()
    input, parameters, g = case.make()
    counted = int(case.masked(torch.ones_like(g)).select(-3, 0).sum())
    for head, value in enumerate(logit_map.mean_eigenvalue()[0]):
        wanted = case.jacobian(input, parameters, head).square().sum() / counted
        assert (value - wanted).abs() <= 1e-10 * wanted


# Limits and theorems


def uneven(seed: int) -> tuple[Case, Tensor, dict[str, Tensor], Tensor]:
    """Token norms over two orders of magnitude, and fewer dimensions per head than tokens."""
    case = Case(sequences=2, tokens=4, features=5, heads=1, head_dim=2)
    input, parameters, g = case.make(seed)
    manual_seed(seed)
    return case, input * torch.randn(2, 4, 1).mul(1.5).exp(), parameters, g


def test_step_is_downhill_and_never_uphill_however_early_it_stops():
    def downhill(seed: int, step) -> bool:
        case, input, parameters, g = uneven(seed)
        plain = vjp(lambda p: case.plain(input, p), parameters)[1](g)[0]
        along = (flat(step(case, input, parameters, g)) * flat(plain)).sum()
        return bool(along >= 0 if stopped else along > 0)

    for damping in (0.0, 1e-3):
        for iterations in (1, 3, 200):
            stopped = iterations < 200  # too early to have left the start, where nothing moves
            rule = AttentionIdeal(damping, True, None, iterations)
            assert all(downhill(seed, lambda *call, rule=rule: case_step(*call, rule)) for seed in range(20))
    # The test can fail: rows rescaled by 1 / (|x|² + 1) do go uphill.
    assert not all(downhill(seed, proportional_rows) for seed in range(20))


def test_damping_that_keeps_the_equation_diagonal_goes_uphill():
    """Why AttentionIdeal's ridge is λ v, for which there is no O(t³) solution, and not μ A v A, for which there is."""

    def along(seed: int, whitened: bool) -> float:
        case, input, parameters, g = uneven(seed)
        j = replace(case, sequences=0).jacobian(input[0], parameters, 0)
        x = torch.cat([input[0], torch.ones(case.tokens, 1)], 1)
        ridge = torch.kron(x @ x.mT, x @ x.mT) if whitened else torch.eye(case.tokens**2)
        kernel, right = j @ j.mT, g[0].flatten()
        ridge = ridge * 1e-2 * kernel.trace() / ridge.trace()
        return float(right @ kernel @ torch.linalg.solve(kernel + ridge, right))

    assert all(along(seed, whitened=False) > 0 for seed in range(20))
    assert any(along(seed, whitened=True) < 0 for seed in range(20))


def case_step(case: Case, input: Tensor, parameters: dict[str, Tensor], g: Tensor, rule: AttentionIdeal):
    return case.step(input, parameters, g, rule)


def proportional_rows(case: Case, input: Tensor, parameters: dict[str, Tensor], g: Tensor) -> dict[str, Tensor]:
    """The gradients of `Proportional` on both projections."""
    scale = 1 / (input.square().sum(-1, keepdim=True) + 1)
    q, k = ((input @ parameters[f"{s}_weight"].mT + parameters[f"{s}_bias"]).requires_grad_() for s in ("q", "k"))
    heads = [t.unflatten(-1, (case.heads, case.head_dim)) for t in (q, k)]
    found = torch.einsum("...ihf,...jhf->...hij", *heads) / math.sqrt(case.head_dim)
    rows = [(scale * t).flatten(0, 1) for t in torch.autograd.grad(found, [q, k], g)]
    weights = [t.mT @ input.flatten(0, 1) for t in rows]
    return dict(zip(NAMES, [*weights, *(t.sum(0) for t in rows)], strict=True))


# One head: each has a ridge, and so a length, of its own.
@pytest.mark.parametrize("case", [Case(heads=1), Case(9, 6, heads=1)], ids=["dense", "iterative"])
def test_infinite_damping_is_the_plain_direction(case):
    input, parameters, g = case.make()
    plain = flat(vjp(lambda p: case.plain(input, p), parameters)[1](g)[0])

    def cosine(damping: float) -> float:
        ideal = flat(case.step(input, parameters, g, AttentionIdeal(damping, **CONVERGED)))
        return float(ideal @ plain / (ideal.norm() * plain.norm()))

    assert cosine(1e8) > 1 - 1e-6
    assert cosine(1e-3) < 0.99


@pytest.mark.parametrize("damping", [0.0, 1e-2])
def test_step_takes_the_units_of_input_and_weights_as_it_should(damping):
    """X in other units, with the weights to match, is the same logits: a logit moves by the same."""
    case = Case(sequences=2, bias=False)
    input, parameters, g = case.make()
    keywords = {"grad_logits": g, "num_heads": case.heads}

    def moved(unit: float, damping: float) -> Tensor:
        w = {name: p / unit for name, p in parameters.items()}
        step = case.step(unit * input, w, g, AttentionIdeal(damping, **CONVERGED))
        return effective_logit_update(unit * input, **w, **keywords, gradients=step)

    assert relative_error(moved(10.0, damping), moved(1.0, damping)) <= 1e-7
    assert relative_error(moved(1.0, damping + 0.1), moved(1.0, damping)) > 1e-3


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**80])
def test_step_is_linear_in_gradients_however_small_or_large(factor):
    case = Case(sequences=9, tokens=6)
    input, parameters, g = (t.float() if isinstance(t, Tensor) else t for t in case.make())
    parameters = {name: p.float() for name, p in parameters.items()}
    once, scaled = (case.step(input, parameters, g * f, AttentionIdeal()) for f in (1.0, factor))
    for name, gradient in once.items():
        assert torch.equal(scaled[name].double() / factor, gradient.double())


def test_head_without_gradient_stays_and_leaves_the_others_alone():
    case = Case(sequences=3, heads=3)
    input, parameters, g = case.make()
    full = case.step(input, parameters, g, AttentionIdeal(**CONVERGED))
    g = g.clone()
    g[:, 1] = 0
    found = case.step(input, parameters, g, AttentionIdeal(**CONVERGED))
    for name, gradient in found.items():
        gradient, wanted = (t.unflatten(0, (3, case.head_dim)) for t in (gradient, full[name]))
        assert gradient[1].abs().max() == 0
        assert relative_error(gradient[0], wanted[0]) <= EXACT


@pytest.mark.parametrize(
    "frozen", [("q_weight", "q_bias"), ("k_weight", "k_bias"), ("q_bias",), NAMES[:2], ("k_bias",)]
)
@pytest.mark.parametrize("damping", [0.0, 1e-2])
def test_frozen_parameters_are_left_out_of_what_moves(frozen, damping):
    case = Case(sequences=2, tokens=3, heads=1)
    input, parameters, g = case.make()
    leaves = {name: p.clone().requires_grad_(name not in frozen) for name, p in parameters.items()}
    rule = AttentionIdeal(damping, **CONVERGED)
    logits(input, **leaves, num_heads=1, correction=rule).backward(g)
    assert all(leaves[name].grad is None for name in frozen)
    j = case.jacobian(input, parameters, 0)
    kept = torch.cat([torch.full((p.numel(),), name not in frozen) for name, p in parameters.items()])
    j = j[:, kept]
    stacked = torch.cat([j, (damping * j.square().sum() / g.numel()).sqrt() * torch.eye(j.shape[1])])
    wanted = torch.linalg.lstsq(stacked, torch.cat([g.flatten(), torch.zeros(j.shape[1])])[:, None], driver="gelsd")
    found = torch.cat([leaf.grad.flatten() for name, leaf in leaves.items() if name not in frozen])
    assert relative_error(found, wanted.solution[:, 0]) <= 1e-6
