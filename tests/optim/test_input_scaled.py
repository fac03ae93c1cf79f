"""InputScaled beside its formula, which the fuzzer has: limits, reports, and weights that are held or land on zero."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import InputScaled
from tests.helpers.proximal import Proximal
from tests.helpers.steps import same, sgd, stepped

pytestmark = pytest.mark.usefixtures("in_float64")

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01, weight_decay=0.1),
}


def test_a_weight_is_held_through_steps_that_do_nothing():
    """Those of a warm-up that begins at 0; the first one that may step shrinks it, at a gradient of 0 too."""
    layer = nn.Linear(4, 3)
    start = layer.weight.detach().clone()
    optimizer = InputScaled(sgd(layer, 0.0), layer, every=1, decay=0.0, hold=True)

    def step(size: float, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        (factor * layer(torch.full((5, 4), size)).sum()).backward()
        optimizer.step()

    step(2.0)
    step(6.0)
    optimizer.param_groups[0]["lr"] = 1e-15
    assert torch.equal(layer.weight, start)
    step(7.0, factor=0.0)
    torch.testing.assert_close(layer.weight.detach(), start * 2 / 7)
    step(10.0)
    torch.testing.assert_close(layer.weight.detach(), start / 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lr", [1e-6, torch.tensor(1e-6)], ids=["number", "tensor"])
def test_a_step_that_rounding_swallows_is_one(dtype, lr):
    layer = nn.Linear(4, 3, dtype=dtype)
    start = layer.weight.detach().clone()
    inner = sgd(layer, lr, weight_decay=1e-4)  # which reads the weights
    optimizer = InputScaled(inner, layer, every=1, decay=0.0, hold=True)
    for size in (2.0, 10.0, 10.0):
        optimizer.zero_grad()
        layer(torch.full((5, 4), size, dtype=dtype)).mean().backward()
        optimizer.step()
    torch.testing.assert_close(layer.weight.detach() / start, torch.full_like(start, 0.2), rtol=1e-2, atol=0)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layers_that_read_no_more_than_the_floor_take_the_bare_step_bit_for_bit(name, at_once):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    bare, x = copy.deepcopy(model), torch.rand(10, 4)
    optimizer, plain = InputScaled(OPTIMIZERS[name](model.parameters()), model), OPTIMIZERS[name](bare.parameters())
    for group in (*optimizer.param_groups, *plain.param_groups):
        group["foreach"] = at_once
    assert same(stepped(model, optimizer, *[x] * 4), stepped(bare, plain, *[x] * 4))
    assert str(optimizer.coverage()).count(": divided by 1, input RMS 0.") == 2


@pytest.mark.parametrize(("name", "power"), [("sgd", 2), ("adam", 1)])
def test_output_moves_by_the_same_whatever_the_size_of_the_input(name, power):
    """Behind Adam the bare step's effect grows as |x|, behind SGD as |x|²; scaled, as with inputs of RMS 1."""
    x = F.normalize(torch.randn(1, 4)) * 2  # RMS 1

    def moved(size: float, wrap) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(4, 3, bias=False)
        optimizer = wrap(OPTIMIZERS[name](layer.parameters()), layer)
        before = layer(size * x)
        (before @ torch.tensor([1.0, -2.0, 0.5])).sum().backward()
        optimizer.step()
        return (layer(size * x) - before).detach()

    def bare(inner, layer):
        return inner

    assert torch.allclose(moved(8.0, bare), 8.0**power * moved(1.0, bare), rtol=1e-6)
    assert torch.allclose(moved(8.0, InputScaled), moved(1.0, InputScaled), rtol=1e-6)


def test_coverage_and_metrics_say_what_steps_are_divided_by():
    layer = nn.Linear(4, 3)
    optimizer = InputScaled(sgd(layer), layer, every=1, decay=0.0)
    stepped(layer, optimizer, *(torch.full((5, 4), size) for size in (2.0, 6.0)))
    assert str(optimizer.coverage()).splitlines()[1:] == [
        "weight: divided by 6, input RMS 6",
        "bias: skipped (a bias moves its output by its own step, whatever the layer reads)",
    ]
    found = optimizer.metrics()
    assert found["InputScaled/weight/input_rms"] == pytest.approx(6.0)
    assert repr(optimizer).startswith("InputScaled")
    assert "hold=False" in repr(optimizer)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("value", [0.0, 0.7])
def test_a_step_may_land_on_zero(value, hold):
    layer = nn.Linear(4, 64)
    optimizer = InputScaled(Proximal(layer.parameters(), value), layer, hold=hold, every=1)
    for size in (2.9, 5.3):  # w s / s is w for 3 and 5
        before = layer.weight.detach().clone()
        layer.zero_grad()
        layer(torch.full((2, 4), size)).sum().backward()
        optimizer.step()
        landed = layer.weight == 0
        assert bool(landed.any()) == (value == 0)
        assert bool(((before.abs() * 2.9 < 1) <= landed).all()) == (value == 0)


def test_float16_weights_that_underflow_in_the_steps_variables_are_no_zeros():
    layer = nn.Linear(4, 2, bias=False).half()
    nn.init.constant_(layer.weight, 1e-6)  # times 0.01 it is less than float16 holds
    before = layer.weight.detach().clone()
    optimizer = InputScaled(sgd(layer, 0.0, weight_decay=0.1), layer, floor=1e-3)
    layer(torch.full((1, 4), 0.01).half()).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, before)


def test_a_scale_that_was_held_is_forgotten_by_an_optimizer_that_holds_none():
    layer = nn.Linear(4, 2, bias=False)
    saved = InputScaled(sgd(layer), layer, every=1, decay=0.0, hold=True)
    stepped(layer, saved, 2 * torch.ones(3, 4))
    plain, again = (InputScaled(sgd(layer), layer, every=1, decay=0.0, hold=hold) for hold in (False, True))
    plain.load_state_dict(saved.state_dict())
    stepped(layer, plain, 20 * torch.ones(3, 4))
    again.load_state_dict(plain.state_dict())
    before = layer.weight.detach().clone()
    stepped(layer, again, 20 * torch.ones(3, 4))
    assert (layer.weight - before).abs().max() < 0.5 * before.abs().max()  # by a step; shrunk it would be a tenth
