"""The program about attention: its equations against autograd, `jacobian.ideal_update` and torch's own module."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp, vjp

from adiv_optim import jacobian
from examples import attention
from examples.attention import Ideal, Logits, SelfAttention
from tests.helpers.cases import relative_error

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-8  # conjugate gradients square the condition
CONVERGED = {"tolerance": 1e-14, "max_iterations": 3000}

#: Sequences, tokens, width and heads.
BATCH, ONE_HEAD = (3, 4, 6, 2), (2, 5, 4, 1)


def made(case, **options):
    sequences, tokens, width, heads = case
    torch.manual_seed(0)
    logits = Logits(width, heads, **options)
    return logits, torch.randn(sequences, tokens, width), torch.randn(sequences, heads, tokens, tokens)


def step_of(case, rule):
    """What a backward leaves in the parameters, with minus signs."""
    logits, x, g = made(case, ideal=rule)
    logits(x).backward(g)
    return {name: -p.grad for name, p in logits.named_parameters()}


def arranged(parameters):
    """θ of a dict by name."""
    sides = [torch.cat([parameters[f"{s}.weight"], parameters[f"{s}.bias"][:, None]], 1) for s in ("query", "key")]
    return torch.stack(sides)


def test_plain_step_moves_logits_as_the_paper_says():
    logits, x, g = made((1, 4, 6, 2))
    at = {name: p.detach() for name, p in logits.named_parameters()}

    def run(parameters):
        return functional_call(logits, parameters, (x,))

    step = {name: -gradient for name, gradient in vjp(run, at)[1](g)[0].items()}
    found = jvp(run, (at,), (step,))[1]
    rows = torch.cat([x[0], torch.ones(4, 1)], 1)
    for head in range(2):
        q, k = (logits.split(side(x))[0, head] for side in (logits.query, logits.key))
        a, b, c = rows @ rows.mT, k @ k.mT, q @ q.mT
        assert relative_error(found[0, head], -(a @ g[0, head] @ b + c @ g[0, head] @ a) / 3) <= 1e-12
        # Eq. 63 as printed has B and C the other way round.
        assert relative_error(found[0, head], -(a @ g[0, head] @ c + b @ g[0, head] @ a) / 3) > 0.1


@pytest.mark.parametrize(("case", "damping"), [(ONE_HEAD, 0.0), (ONE_HEAD, 1e-2), (ONE_HEAD, 10.0), (BATCH, 0.0)])
def test_ideal_step_is_that_of_any_module(case, damping):
    logits, x, g = made(case)
    wanted = jacobian.ideal_update(logits, x, g, damping)
    found = step_of(case, Ideal(damping, **CONVERGED))
    for name, step in wanted.items():
        assert relative_error(found[name], step) <= 1e-6


def test_alone_is_the_sum_of_the_steps_of_each_sequence():
    case, rule = BATCH, Ideal(1e-2, joint=False, **CONVERGED)
    logits, x, g = made(case, ideal=rule)
    for at in range(len(x)):
        logits(x[at : at + 1]).backward(g[at : at + 1])
    together = step_of(case, rule)
    for name, parameter in logits.named_parameters():
        assert relative_error(parameter.grad, -together[name]) <= EXACT
    assert relative_error(arranged(step_of(case, Ideal(1e-2, **CONVERGED))), arranged(together)) > 0.1


def test_forward_and_input_gradient_are_plain_bit_for_bit():
    found = []
    for rule in (None, Ideal()):
        logits, x, g = made(BATCH, ideal=rule)
        x.requires_grad_()
        output = logits(x)
        output.backward(g)
        found.append((output, x.grad, logits.query.weight.grad))
    (output, input, weight), (other, other_input, other_weight) = found
    assert torch.equal(output, other)
    assert torch.equal(input, other_input)
    assert relative_error(other_weight, weight) > 0.1


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
