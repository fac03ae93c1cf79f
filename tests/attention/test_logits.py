"""Attention logits under autograd, in lower precision, and with numbers that are none."""

import math

import pytest
import torch
from torch import Tensor

from adiv_optim.attention import (
    AttentionIdeal,
    SelfAttention,
    logits,
)
from tests.helpers.attention import Case, each_case, flat
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired

pytestmark = pytest.mark.usefixtures("in_float64")

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
    ids=["undamped", "dense", "iterative", "iterative-damped"],
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
        found.float().square().sum().backward(retain_graph=True)  # within the block as well: the solve stays wide
    within = layer.q_proj.weight.grad.clone()
    layer.zero_grad()
    found.float().square().sum().backward()
    layer_grad = layer.q_proj.weight.grad.clone()
    assert torch.equal(within, layer_grad)
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
