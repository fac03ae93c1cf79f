"""The program about attention: its equations against autograd, `jacobian.ideal_update` and torch's own module."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp, vjp

from adiv_optim import jacobian
from examples import attention
from examples.attention import Ideal, LogitMap, Logits, SelfAttention, ideal_step, problems
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-8  # conjugate gradients square the condition
CONVERGED = {"tolerance": 1e-14, "max_iterations": 3000}

#: Sequences, tokens, width and heads. Of one sequence with no more tokens than numbers in a head all logits can move.
CASES = {"reachable": (1, 4, 12, 2), "batch": (3, 4, 6, 2), "one head": (2, 5, 4, 1)}


def made(case, seed=0, **options):
    sequences, tokens, width, heads = case
    torch.manual_seed(seed)
    logits = Logits(width, heads, **options)
    return logits, torch.randn(sequences, tokens, width), torch.randn(sequences, heads, tokens, tokens)


def step_of(case, rule, seed=0):
    """What a backward leaves in the parameters, with minus signs."""
    logits, x, g = made(case, seed, ideal=rule)
    logits(x).backward(g)
    return {name: -p.grad for name, p in logits.named_parameters()}


def plain_of(case, seed=0):
    """The logits as a function of the parameters, these, and what a step moves them by."""
    logits, x, g = made(case, seed)
    at = {name: p.detach() for name, p in logits.named_parameters()}

    def run(parameters):
        return functional_call(logits, parameters, (x,))

    return run, at, g, lambda step: jvp(run, (at,), (step,))[1]


def arranged(parameters):
    """θ of a dict by name."""
    sides = [torch.cat([parameters[f"{s}.weight"], parameters[f"{s}.bias"][:, None]], 1) for s in ("query", "key")]
    return torch.stack(sides)


@paired("case joint", CASES, {"joint": True, "alone": False})
def test_map_is_the_derivative_and_its_adjoint(case, joint):
    run, at, g, move = plain_of(case)
    logits, x, _ = made(case)
    queries, keys = logits.split(logits.query(x)), logits.split(logits.key(x))
    logit_map = LogitMap.of(x, queries, keys, joint)
    pulled = logit_map.adjoint(problems(g, joint)).sum(1).flatten(1, 2)
    assert relative_error(pulled, arranged(vjp(run, at)[1](g)[0])) <= 1e-12
    step = {name: torch.randn_like(p) for name, p in at.items()}
    theta = arranged(step).unflatten(1, (logits.heads, -1)).unsqueeze(1)
    count = 1 if joint else len(x)
    assert (
        relative_error(logit_map.forward(theta.expand(-1, count, *theta.shape[2:])), problems(move(step), joint))
        <= 1e-12
    )
    columns = torch.eye(theta[:, 0].numel()).unflatten(1, theta.shape).unbind()
    trace = sum(logit_map.forward(e.expand(-1, count, *e.shape[2:])).square().sum((2, 3, 4)) for e in columns)
    assert relative_error(logit_map.mean_eigenvalue(), trace / (g[0, 0].numel() * len(x) / count)) <= 1e-12


def test_plain_step_moves_logits_as_the_paper_says():
    case = (1, 4, 6, 2)
    run, at, g, move = plain_of(case)
    found = move({name: -gradient for name, gradient in vjp(run, at)[1](g)[0].items()})
    logits, x, _ = made(case)
    rows = torch.cat([x[0], torch.ones(4, 1)], 1)
    for head in range(2):
        q, k = (logits.split(side(x))[0, head] for side in (logits.query, logits.key))
        a, b, c = rows @ rows.mT, k @ k.mT, q @ q.mT
        assert relative_error(found[0, head], -(a @ g[0, head] @ b + c @ g[0, head] @ a) / 3) <= 1e-12
        # Eq. 63 as printed has B and C the other way round.
        assert relative_error(found[0, head], -(a @ g[0, head] @ c + b @ g[0, head] @ a) / 3) > 0.1


@pytest.mark.parametrize("damping", [0.0, 1e-2, 10.0])
def test_ideal_step_is_that_of_any_module(damping):
    logits, x, g = made(CASES["one head"])
    wanted = jacobian.ideal_update(logits, x, g, damping)
    found = step_of(CASES["one head"], Ideal(damping, **CONVERGED))
    for name, step in wanted.items():
        assert relative_error(found[name], step) <= 1e-6


def test_alone_is_the_sum_of_the_steps_of_each_sequence():
    case, rule = CASES["batch"], Ideal(1e-2, joint=False, **CONVERGED)
    logits, x, g = made(case, ideal=rule)
    for at in range(len(x)):
        logits(x[at : at + 1]).backward(g[at : at + 1])
    together = step_of(case, rule)
    for name, parameter in logits.named_parameters():
        assert relative_error(parameter.grad, -together[name]) <= EXACT
    assert relative_error(arranged(step_of(case, Ideal(1e-2, **CONVERGED))), arranged(together)) > 0.1


def test_step_is_downhill_however_early_it_stops():
    for iterations in (1, 3, 300):
        for seed in range(20):
            run, at, g, _ = plain_of(CASES["one head"], seed)
            step = step_of(CASES["one head"], Ideal(1e-3, tolerance=1e-14, max_iterations=iterations), seed)
            assert (arranged(step) * arranged(vjp(run, at)[1](g)[0])).sum() < 0


def test_forward_and_input_gradient_are_plain_bit_for_bit():
    found = []
    for rule in (None, Ideal()):
        logits, x, g = made(CASES["batch"], ideal=rule)
        x.requires_grad_()
        output = logits(x)
        output.backward(g)
        found.append((output, x.grad, logits.query.weight.grad))
    (output, input, weight), (other, other_input, other_weight) = found
    assert torch.equal(output, other)
    assert torch.equal(input, other_input)
    assert relative_error(other_weight, weight) > 0.1


def test_head_without_a_gradient_stays_and_nan_travels():
    logits, x, g = made(CASES["batch"])
    logit_map = LogitMap.of(x, logits.split(logits.query(x)), logits.split(logits.key(x)), True)
    theta = ideal_step(logit_map, problems(g * torch.tensor([1.0, 0.0])[:, None, None], True), Ideal(0.0))
    assert theta[:, 0, 1].abs().max() == 0 < theta[:, 0, 0].abs().max()
    g[0, 0, 0, 0] = math.nan
    theta = ideal_step(logit_map, problems(g, True), Ideal())
    assert theta[:, 0, 0].isnan().all()
    assert theta[:, 0, 1].isfinite().all()


def test_second_derivatives_raise():
    logits, x, g = made(CASES["batch"], ideal=Ideal())
    (first,) = torch.autograd.grad((logits(x) * g).square().sum(), logits.query.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first.sum().backward()


@pytest.mark.parametrize("options", [{}, {"ideal": Ideal()}], ids=["plain", "ideal"])
def test_module_is_torchs_multihead_attention(options):
    mha, layer, x = nn.MultiheadAttention(8, 2, batch_first=True), SelfAttention(8, 2, **options), torch.randn(3, 5, 8)
    projections = (layer.logits.query, layer.logits.key, layer.value)
    for weight, projection in zip(mha.in_proj_weight.chunk(3), projections, strict=True):
        assert (projection.weight.std() / weight.std()).item() == pytest.approx(1, abs=0.3)
        projection.weight.data = weight
    layer.out.weight.data = mha.out_proj.weight
    assert relative_error(layer(x), mha(x, x, x, need_weights=False)[0]) <= 1e-12


def test_program_prints_what_its_methods_do(capsys, monkeypatch):
    pixels, labels = attention.load_digits(return_X_y=True)
    monkeypatch.setattr(attention, "load_digits", lambda **_: (pixels[:160], labels[:160]))
    torch.set_default_dtype(torch.float32)
    attention.main(["--draws", "1", "--rounds", "1", "--epochs", "1", "--seeds", "2"])
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n  {name} ") == 3 for name in attention.METHODS)
    assert "nan" not in printed
    ideal, plain = (
        next(line for line in printed.splitlines() if line.startswith(f"  {m} ")) for m in ("ideal", "plain")
    )
    assert float(ideal.split("1: ")[1].split()[0]) > 0.99 > 0.8 > float(plain.split("1: ")[1].split()[0])
