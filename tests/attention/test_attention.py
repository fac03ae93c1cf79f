"""Attention logits: their ideal step, held against dense least squares, real steps and torch's own attention."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp

from adiv_optim import BatchIdeal, Proportional, attach, coverage
from adiv_optim.attention import (
    AttentionIdeal,
    LogitProjection,
    SelfAttention,
    _solve,
    alignment,
    effective_logit_update,
    ideal_logit_step,
    logits,
)
from adiv_optim.attention._logits import build, project
from adiv_optim.attention._map import arrange
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired

EXACT = 1e-8  # float64; conjugate gradients and Gram matrices square the condition
CONVERGED = {"tolerance": None, "max_iterations": 5000}
NAMES = ("q_weight", "k_weight", "q_bias", "k_bias")


@dataclass(frozen=True)
class Case:
    """One call: sequences (0: none, a single one without its dimension), tokens, features, heads, head_dim."""

    sequences: int = 0
    tokens: int = 4
    features: int = 6
    heads: int = 2
    head_dim: int = 3
    bias: bool = True
    causal: bool = False

    def make(self, seed: int = 0) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """X, the parameters and g."""
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        leading = (self.sequences,) if self.sequences else ()
        rows = self.heads * self.head_dim
        parameters = {name: randn(rows, self.features) / self.features**0.5 for name in NAMES[:2]}
        if self.bias:
            parameters |= {name: randn(rows) for name in NAMES[2:]}
        input = randn(*leading, self.tokens, self.features)
        return input, parameters, self.masked(randn(*leading, self.heads, self.tokens, self.tokens))

    @property
    def mask(self) -> Tensor | None:
        return torch.ones(self.tokens, self.tokens).tril().bool() if self.causal else None

    def masked(self, found: Tensor) -> Tensor:
        return found if self.mask is None else found.masked_fill(~self.mask, 0)

    def plain(self, input: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """The logits as a formula of their own, zero where masked."""
        q = input @ parameters["q_weight"].mT + parameters.get("q_bias", 0)
        k = input @ parameters["k_weight"].mT + parameters.get("k_bias", 0)
        q, k = (t.unflatten(-1, (self.heads, self.head_dim)) for t in (q, k))
        return self.masked(torch.einsum("...ihf,...jhf->...hij", q, k) / math.sqrt(self.head_dim))

    def jacobian(self, input: Tensor, parameters: dict[str, Tensor], head: int) -> Tensor:
        """Explicit derivative of one head's logits by every number of its parameters."""
        rows = slice(head * self.head_dim, (head + 1) * self.head_dim)

        def of_head(own: dict[str, Tensor]) -> Tensor:
            joined = {name: torch.cat([p[: rows.start], own[name], p[rows.stop :]]) for name, p in parameters.items()}
            return self.plain(input, joined).select(-3, head).flatten()

        found = jacrev(of_head)({name: p[rows] for name, p in parameters.items()})
        return torch.cat([found[name].flatten(1) for name in parameters], 1)

    def by_lstsq(self, input: Tensor, parameters: dict[str, Tensor], g: Tensor, damping: float) -> dict[str, Tensor]:
        """argmin |Jθ − g|² + λ|θ|² of least norm from the explicit Jacobian, head by head."""
        found: dict[str, list[Tensor]] = {name: [] for name in parameters}
        for head in range(self.heads):
            j = self.jacobian(input, parameters, head)
            right = g.select(-3, head).flatten()
            count = int(self.masked(torch.ones_like(g)).select(-3, head).sum())
            ridge = damping * j.square().sum() / count
            stacked = torch.cat([j, ridge.sqrt() * torch.eye(j.shape[1])])
            wanted = torch.cat([right, torch.zeros(j.shape[1])])
            solution = torch.linalg.lstsq(stacked, wanted[:, None], driver="gelsd").solution[:, 0]
            sizes = [self.head_dim * p[0].numel() for p in parameters.values()]
            for (name, p), part in zip(parameters.items(), solution.split(sizes), strict=True):
                found[name].append(part.view(self.head_dim, *p.shape[1:]))
        return {name: torch.cat(parts) for name, parts in found.items()}

    def step(self, input: Tensor, parameters: dict[str, Tensor], g: Tensor, rule: AttentionIdeal) -> dict[str, Tensor]:
        """What a backward leaves in the parameters."""
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        found = logits(input, **leaves, num_heads=self.heads, correction=rule, mask=self.mask)
        return dict(zip(leaves, torch.autograd.grad(found, list(leaves.values()), g), strict=True))


REACHABLE = {
    "sixteen-tokens": Case(tokens=16, features=64, heads=4, head_dim=16),
    "no-bias": Case(tokens=16, features=64, heads=4, head_dim=16, bias=False),
    "one-sequence-of-a-batch": Case(sequences=1, tokens=3, features=5, heads=2, head_dim=4),
}
UNREACHABLE = {
    "head-dim-8": Case(tokens=16, features=20, heads=2, head_dim=8),
    "head-dim-below-tokens": Case(tokens=5, features=8, heads=2, head_dim=2),
    "three-sequences": Case(sequences=3),
    "three-sequences-no-bias": Case(sequences=3, bias=False),
    "causal": Case(tokens=5, head_dim=2, causal=True),
    "causal-batch": Case(sequences=2, tokens=5, head_dim=2, causal=True),
    "more-tokens-than-features": Case(tokens=7, features=3, head_dim=8),
}
each_reachable = pytest.mark.parametrize("case", REACHABLE.values(), ids=REACHABLE)
each_unreachable = pytest.mark.parametrize("case", UNREACHABLE.values(), ids=UNREACHABLE)
each_case = pytest.mark.parametrize("case", (REACHABLE | UNREACHABLE).values(), ids=REACHABLE | UNREACHABLE)


pytestmark = pytest.mark.usefixtures("in_float64")


def flat(parameters: dict[str, Tensor]) -> Tensor:
    return torch.cat([parameters[name].flatten() for name in sorted(parameters)])


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

    assert deviation(case.step(input, parameters, g, AttentionIdeal(damping=0.0))) <= 1e-6
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
    batched, right = (input, g) if case.sequences else (input[None], g[None])
    q, k = (project(batched, parameters[f"{s}_weight"], parameters.get(f"{s}_bias"), case.heads) for s in ("q", "k"))
    logit_map = build(batched, q, k, case.head_dim**-0.5, case.mask, frozenset(parameters), joint)
    return logit_map, arrange(right, joint)


@paired("case joint", REACHABLE | UNREACHABLE, {"joint": True, "alone": False})
def test_dense_and_iterative_solvers_agree(case, joint):
    logit_map, right = linearised(case, joint)
    for damping in (1e-3, 1.0):
        dense = _solve.dense(logit_map, right, damping)
        iterative = _solve.iterative(logit_map, right, damping, *CONVERGED.values())
        early = _solve.iterative(logit_map, right, damping, None, 2)
        for side, part in dense.items():
            assert relative_error(iterative[side], part) <= EXACT
            assert relative_error(early[side], part) > 100 * EXACT


@pytest.mark.parametrize("case", [Case(3, 3, 5, 2, 6), Case(3, 3, 5, 2, 6, bias=False)], ids=["bias", "no-bias"])
def test_eigenvectors_and_conjugate_gradients_agree(case):
    logit_map, right = linearised(case, joint=False)
    direct = _solve.reachable(logit_map, right)
    iterative = _solve.iterative(logit_map, right, 0.0, *CONVERGED.values())
    damped = _solve.iterative(logit_map, right, 1e-3, *CONVERGED.values())
    for side, part in direct.items():
        assert relative_error(iterative[side], part) <= EXACT
        assert relative_error(damped[side], part) > 100 * EXACT


def test_eigenvectors_are_not_used_where_logits_cannot_be_reached():
    for case in UNREACHABLE.values():
        assert _solve.reachable(*linearised(case, joint=True)) is None
    logit_map, right = linearised(Case(1, 3, 5, 2, 6), joint=True)
    assert _solve.reachable(logit_map, right) is not None
    twice = logit_map.rows.clone()
    twice[..., 1, :] = twice[..., 0, :]  # a token that repeats
    assert _solve.reachable(replace(logit_map, rows=twice), right) is None


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


# The diagnostics


@each_case
def test_effective_update_is_jvp_of_vjp(case):
    input, parameters, g = case.make()

    def plain(p: dict[str, Tensor]) -> Tensor:
        return case.plain(input, p)

    gradients = vjp(plain, parameters)[1](g)[0]
    wanted = -jvp(plain, (parameters,), (gradients,))[1]
    keywords = {"num_heads": case.heads, "mask": case.mask}
    found = effective_logit_update(input, grad_logits=g, **parameters, **keywords)
    assert relative_error(found, wanted) <= 1e-12
    given = effective_logit_update(input, grad_logits=g, **parameters, **keywords, gradients=gradients)
    assert relative_error(given, wanted) <= 1e-12
    other = effective_logit_update(input, grad_logits=g, **parameters, **keywords, scale=1.0)
    assert relative_error(other, wanted) > 0.1


def test_effective_update_of_one_sequence_is_the_formula_of_the_paper():
    case = Case()
    input, parameters, g = case.make()
    x = torch.cat([input, torch.ones(case.tokens, 1)], 1)
    found = effective_logit_update(input, grad_logits=g, **parameters, num_heads=case.heads)
    for head in range(case.heads):
        rows = slice(head * case.head_dim, (head + 1) * case.head_dim)
        q, k = (input @ parameters[f"{s}_weight"][rows].mT + parameters[f"{s}_bias"][rows] for s in ("q", "k"))
        a, b, c = x @ x.mT, k @ k.mT, q @ q.mT
        assert relative_error(found[head], -(a @ g[head] @ b + c @ g[head] @ a) / case.head_dim) <= 1e-12
        # Eq. 63 as printed has B and C the other way round.
        assert relative_error(found[head], -(a @ g[head] @ c + b @ g[head] @ a) / case.head_dim) > 0.1


@paired("case joint", REACHABLE | UNREACHABLE, {"joint": True, "alone": False})
def test_ideal_step_is_what_a_backward_leaves(case, joint):
    input, parameters, g = case.make()
    rule = AttentionIdeal(1e-2, joint=joint, **CONVERGED)
    found = ideal_logit_step(input, grad_logits=g, **parameters, num_heads=case.heads, mask=case.mask, rule=rule)
    left = case.step(input, parameters, g, rule)
    assert found.gradients.keys() == parameters.keys()
    for name, gradient in found.gradients.items():
        assert relative_error(gradient, left[name]) <= 1e-12
    heads = (case.heads,) if joint or not case.sequences else (case.sequences, case.heads)
    assert found.misfit.shape == found.residual.shape == heads
    assert found.residual.max() <= EXACT
    assert 0 < found.misfit.min() <= found.misfit.max() < 1


def test_misfit_is_zero_where_logits_can_be_reached_and_not_elsewhere():
    def misfit(case: Case) -> float:
        input, parameters, g = case.make()
        rule = AttentionIdeal(0.0, **CONVERGED)
        return ideal_logit_step(input, grad_logits=g, **parameters, num_heads=case.heads, rule=rule).misfit.max().item()

    assert misfit(REACHABLE["sixteen-tokens"]) <= 1e-9
    assert misfit(UNREACHABLE["head-dim-8"]) > 0.1


def test_alignment_of_plain_and_ideal():
    case = REACHABLE["sixteen-tokens"]
    input, parameters, g = case.make()
    keywords = {"grad_logits": g, **parameters, "num_heads": case.heads}
    step = ideal_logit_step(input, **keywords, rule=AttentionIdeal(0.0)).gradients
    ideal = alignment(effective_logit_update(input, **keywords, gradients=step), g)
    assert (ideal.cosine - 1).abs().max() <= EXACT
    assert (ideal.gain - 1).abs().max() <= EXACT
    plain = alignment(effective_logit_update(input, **keywords), g)
    assert plain.cosine.max() < 0.9
    assert plain.cosine.shape == plain.gain.shape == (case.heads,)
    assert (alignment(g, g).cosine + 1).abs().max() <= EXACT


# Limits and theorems


def uneven(seed: int) -> tuple[Case, Tensor, dict[str, Tensor], Tensor]:
    """Token norms over two orders of magnitude, and fewer dimensions per head than tokens."""
    case = Case(sequences=2, tokens=4, features=5, heads=1, head_dim=2)
    input, parameters, g = case.make(seed)
    torch.manual_seed(seed)
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


# Autograd, precision, NaN


@each_case
def test_forward_and_input_gradient_are_plain_bit_for_bit(case):
    input, parameters, g = case.make()

    def run(rule):
        x = input.clone().requires_grad_()
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        found = logits(x, **leaves, num_heads=case.heads, correction=rule, mask=case.mask)
        found.backward(g)
        return found, x.grad, flat({name: leaf.grad for name, leaf in leaves.items()})

    (plain, plain_input, plain_step), (found, found_input, found_step) = run(None), run(AttentionIdeal())
    assert torch.equal(found, plain)
    assert torch.equal(found_input, plain_input)
    assert relative_error(found_step, plain_step) > 1e-3
    assert relative_error(case.masked(plain), case.plain(input, parameters)) <= 1e-12


def test_second_derivatives_raise():
    case = Case(sequences=2)
    input, parameters, g = case.make()
    for wanted in ("q_weight", "q_bias", "input"):
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        leaves["input"] = input.clone().requires_grad_()
        found = logits(**leaves, num_heads=case.heads, correction=AttentionIdeal())
        first = torch.autograd.grad(
            (found * g).square().sum(), [leaves["input"], leaves["k_weight"]], create_graph=True
        )
        for gradient in first:
            with pytest.raises(RuntimeError, match="differentiated twice"):
                torch.autograd.grad(gradient.sum(), leaves[wanted], retain_graph=True)
    found = logits(**leaves, num_heads=case.heads)
    (gradient,) = torch.autograd.grad(found.square().sum(), leaves["input"], create_graph=True)
    torch.autograd.grad(gradient.sum(), leaves["q_weight"])


def test_functional_gradient_is_corrected_and_vmap_raises():
    case = Case(sequences=3)
    input, parameters, g = case.make()
    wanted = case.step(input, parameters, g, AttentionIdeal())

    def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (logits(x, **p, num_heads=case.heads, correction=AttentionIdeal()) * y).sum()

    for name, gradient in torch.func.grad(loss)(parameters, input, g).items():
        assert relative_error(gradient, wanted[name]) <= 1e-12
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, input, g)


@paired("where poison", {name: name for name in ("input", "q_weight", "g")}, {"nan": math.nan, "inf": math.inf})
@pytest.mark.parametrize(
    ("case", "rule"),
    [
        (Case(tokens=3, heads=1), AttentionIdeal(0.0)),
        (Case(tokens=3, heads=1), AttentionIdeal()),
        (Case(9, 6, heads=1), AttentionIdeal(0.0)),
        (Case(9, 6, heads=1), AttentionIdeal()),
    ],
    ids=["eigenvectors", "dense", "iterative", "iterative-damped"],
)
def test_nan_and_inf_travel_and_do_not_raise(poison, where, rule, case):
    input, parameters, g = case.make()
    assert all(gradient.isfinite().all() for gradient in case.step(input, parameters, g, rule).values())
    {"input": input, "q_weight": parameters["q_weight"], "g": g}[where].view(-1)[1] = poison
    found = case.step(input, parameters, g, rule)
    assert not flat(found).isfinite().all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-1), (torch.float16, 1e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("case", [Case(), Case(9, 6)], ids=["dense", "iterative"])
def test_lower_precision_is_solved_in_float32(dtype, tolerance, case):
    input, parameters, g = case.make()
    rule = AttentionIdeal(0.1, tolerance=1e-6)
    rounded = {name: p.to(dtype) for name, p in parameters.items()}
    found = case.step(input.to(dtype), rounded, g.to(dtype), rule)
    widened = {name: p.double() for name, p in rounded.items()}
    wanted = case.step(input.to(dtype).double(), widened, g.to(dtype).double(), rule)
    for name, gradient in found.items():
        assert gradient.dtype == dtype
        assert relative_error(gradient, wanted[name]) <= tolerance


def test_autocast_gives_what_plain_autocast_gives_and_a_correction():
    layer = SelfAttention(8, 2, correction=AttentionIdeal(0.1)).float()
    plain = SelfAttention(8, 2).float()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = layer(x), plain(x)
    assert torch.equal(found, wanted)
    found.float().square().sum().backward()
    layer_grad = layer.q_proj.weight.grad.clone()
    layer.zero_grad()
    layer(x).square().sum().backward()
    assert layer_grad.dtype == torch.float32
    assert relative_error(layer_grad, layer.q_proj.weight.grad) <= 0.1


@pytest.mark.parametrize("shape", [(0, 4, 6), (2, 0, 6)], ids=["no-sequences", "no-tokens"])
def test_nothing_gives_zero_gradients(shape):
    weight = torch.randn(6, 6, requires_grad=True)
    found = logits(torch.randn(shape), weight, weight, num_heads=2, correction=AttentionIdeal())
    found.sum().backward()
    assert weight.grad.abs().max() == 0


def test_input_of_zeros_moves_nothing():
    weight = torch.randn(6, 6, requires_grad=True)
    for rule in (AttentionIdeal(), AttentionIdeal(0.0)):
        logits(torch.zeros(2, 3, 6), weight, weight, num_heads=2, correction=rule).sum().backward()
        assert weight.grad.abs().max() == 0


# torch.compile may not lose the correction without a word: it breaks the graph, or raises if it must not. The
# notice is torch's own, wherever a graph resumes with a tensor that has a history.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_is_corrected_or_raises():
    layer = SelfAttention(8, 2, correction=AttentionIdeal())
    x = torch.randn(3, 4, 8)
    layer(x).square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    torch.compile(layer, backend="aot_eager")(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert relative_error(parameter.grad, wanted[name]) <= 1e-10
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"(?i)disable|unsupported"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


# The module


@pytest.mark.parametrize(("bias", "causal"), [(True, True), (False, False)], ids=["bias-causal", "full"])
@pytest.mark.parametrize("correction", [None, AttentionIdeal()], ids=["plain", "ideal"])
def test_module_is_torchs_multihead_attention(bias, causal, correction):
    mha = nn.MultiheadAttention(8, 2, bias=bias, batch_first=True)
    if bias:
        nn.init.normal_(mha.in_proj_bias)
        nn.init.normal_(mha.out_proj.bias)
    x = torch.randn(3, 5, 8)
    mask = ~torch.ones(5, 5).tril().bool() if causal else None
    wanted = mha(x, x, x, attn_mask=mask, need_weights=False)[0]
    layer = SelfAttention.from_torch(mha, correction=correction, causal=causal)
    assert relative_error(layer(x), wanted) <= 1e-12
    assert relative_error(layer(x[0]), wanted[0]) <= 1e-12
    other = SelfAttention.from_torch(mha, correction=correction, causal=not causal)
    assert relative_error(other(x), wanted) > 1e-3


def test_module_starts_as_torchs_does():
    torch.manual_seed(1)
    layer, mha = SelfAttention(64, 4), nn.MultiheadAttention(64, 4)
    ours = torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)])
    assert (ours.std() / mha.in_proj_weight.std() - 1).abs() < 0.03
    assert (ours.abs().max() / mha.in_proj_weight.abs().max() - 1).abs() < 0.01
    assert (layer.out_proj.weight.std() / mha.out_proj.weight.std() - 1).abs() < 0.05


def test_state_moves_between_plain_and_corrected():
    plain, ideal = SelfAttention(8, 2), SelfAttention(8, 2, correction=AttentionIdeal())
    ideal.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    assert torch.equal(plain(x), ideal(x))
    again = functional_call(ideal, dict(plain.named_parameters()), (x,))
    assert torch.equal(plain(x), again)


def test_corrected_module_gives_the_value_path_plain_gradients():
    plain, ideal = SelfAttention(8, 2), SelfAttention(8, 2, correction=AttentionIdeal())
    ideal.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    for layer in (plain, ideal):
        layer(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        error = relative_error(ideal.get_parameter(name).grad, parameter.grad)
        assert error == 0 if name.startswith(("v_", "out_")) else error > 1e-3


def test_attach_corrects_value_and_output_and_leaves_query_and_key():
    model = nn.Sequential(SelfAttention(8, 2, correction=AttentionIdeal()))
    attach(model, Proportional())
    assert type(model[0].q_proj) is type(model[0].k_proj) is LogitProjection
    model(torch.randn(2, 5, 8)).square().sum().backward()
    report = coverage(model)
    assert {name.split(".")[1] for name in report.treated} == {"v_proj", "out_proj"}
    assert report.never_seen == {}
    assert {name.split(".")[1] for name in report.skipped} == {"q_proj", "k_proj"}
    plain = attach(SelfAttention(8, 2), Proportional())
    plain(torch.randn(2, 5, 8)).square().sum().backward()
    assert len(coverage(plain).treated) == 8


def test_query_norm_makes_the_size_of_the_weights_irrelevant():
    normed, plain = SelfAttention(8, 2, qk_norm=True), SelfAttention(8, 2)
    x = torch.randn(2, 5, 8)
    for layer, same in ((normed, True), (plain, False)):
        before = layer(x)
        with torch.no_grad():
            layer.q_proj.weight.mul_(3)
        assert (relative_error(layer(x), before) <= 1e-10) == same


# Errors


def test_errors_say_what_was_found_and_what_to_do():
    x, w, b = torch.randn(2, 4, 6), torch.randn(6, 6), torch.randn(6)
    for call, kind, message in (
        (lambda: logits(torch.ones(2, 4, 6).long(), w, w, num_heads=2), TypeError, "input is torch.int64"),
        (lambda: logits(x[0, 0], w, w, num_heads=2), ValueError, "has 1 dimensions; it must have 3"),
        (lambda: logits(x, w[:, :5], w, num_heads=2), ValueError, r"q_weight of shape \(6, 5\) does not take the 6"),
        (lambda: logits(x, w, w[:4], num_heads=2), ValueError, "must have one shape"),
        (lambda: logits(x, w, w, num_heads=4), ValueError, "num_heads is 4, which does not divide the 6 rows"),
        (lambda: logits(x, w, w, num_heads=0), ValueError, "num_heads is 0"),
        (lambda: logits(x, w, w, b, b[:3], num_heads=2), ValueError, r"k_bias has shape \(3,\); it must be \(6,\)"),
        (lambda: logits(x, w, w, num_heads=2, mask=torch.ones(4, 4)), TypeError, "it must be torch.bool"),
        (lambda: logits(x, w, w, num_heads=2, mask=torch.ones(5, 4).bool()), ValueError, "does not broadcast"),
        (lambda: logits(x, w, w, num_heads=2, correction=BatchIdeal()), TypeError, "is BatchIdeal"),
        (lambda: logits(x, w, w, num_heads=2, correction=AttentionIdeal), TypeError, r"write AttentionIdeal\(\)"),
        (lambda: effective_logit_update(x, w, w, x, num_heads=2), ValueError, r"that of the logits is \(2, 2, 4, 4\)"),
        (lambda: ideal_logit_step(x, w, w, x, num_heads=2), ValueError, r"grad_logits has shape \(2, 4, 6\)"),
        (
            lambda: effective_logit_update(x, w, w, torch.ones(2, 2, 4, 4), num_heads=2, gradients={"q_bias": b}),
            ValueError,
            r"gradients has \['q_bias'\]",
        ),
        (lambda: alignment(x, w), ValueError, "they must be the same logits"),
        (lambda: AttentionIdeal(damping=-1.0), ValueError, "damping is -1.0; it must be finite and at least 0"),
        (lambda: AttentionIdeal(damping=math.nan), ValueError, "damping is nan"),
        (lambda: AttentionIdeal(tolerance=-1.0), ValueError, "tolerance is -1.0"),
        (lambda: AttentionIdeal(max_iterations=0), ValueError, "max_iterations is 0"),
        (lambda: SelfAttention(6, 4), ValueError, "num_heads is 4, which does not divide embed_dim 6"),
        (lambda: SelfAttention(6, 2, qk_norm=True, correction=AttentionIdeal()), ValueError, "bilinear"),
        (lambda: SelfAttention(6, 2, correction=Proportional()), TypeError, "use adiv_optim.attach"),
        (lambda: SelfAttention(6, 2)(w[None, None]), ValueError, r"input of shape \(1, 1, 6, 6\)"),
        (lambda: SelfAttention(6, 2, correction=AttentionIdeal()).q_proj(x), RuntimeError, "not called by itself"),
        (lambda: SelfAttention.from_torch(nn.MultiheadAttention(6, 2, dropout=0.1)), ValueError, "uses dropout"),
        (lambda: SelfAttention.from_torch(nn.MultiheadAttention(6, 2, kdim=3)), ValueError, "uses kdim or vdim"),
    ):
        with pytest.raises(kind, match=message):
            call()
