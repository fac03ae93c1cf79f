"""Whitened beside its formula, which the fuzzer has: limits, layouts, precision, and which passes count."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import BatchIdeal, GradientOnly, Preconditioned, Whitened
from tests.helpers.cases import relative_error
from tests.helpers.steps import backward, inputs, network, same, sgd, stepped

pytestmark = pytest.mark.usefixtures("in_float64")


def test_infinite_damping_is_the_optimizer_unchanged():
    def run(damping):
        model = network(5, 4, 2)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
        optimizer = optimizer if damping is None else Whitened(optimizer, model, damping=damping, every=1)
        return torch.cat([p.flatten() for p in stepped(model, optimizer, *(inputs(seed, 6, 5) for seed in range(5)))])

    assert relative_error(run(1e12), run(None)) <= 1e-9
    assert relative_error(run(1.0), run(None)) > 1e-3


@pytest.mark.parametrize("wrap", [partial(Whitened, graft_norm=False), Preconditioned])
def test_with_plain_sgd_the_step_is_that_of_batch_ideal(wrap):
    """Of the present batch alone; its damping is of the size of A, BatchIdeal's of that of X~X~ᵀ."""
    of_inputs = partial(wrap, damping=0.5, decay=0.0, every=1)
    ideal = partial(GradientOnly, correction=BatchIdeal(0.5 * 16 / (8 + 1)))
    models = [network(8, 4) for _ in range(2)]
    pairs = zip(models, (of_inputs, ideal), strict=True)
    found, wanted = (stepped(model, build(sgd(model), model), inputs(0, 16, 8)) for model, build in pairs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_layers_of_two_precisions_step_as_by_themselves():
    class Converted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4, dtype=torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh().float())

    torch.manual_seed(0)
    model, x = Converted(), torch.randn(9, 6)
    alone = copy.deepcopy(model)
    optimizers = [Whitened(torch.optim.AdamW(model.parameters(), lr=0.1), model)]
    optimizers += [Whitened(torch.optim.AdamW(m.parameters(), lr=0.1), m) for m in alone.children()]
    for _ in range(2):
        for each in (model, alone):
            backward(each, x)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert same(model.parameters(), alone.parameters())


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW])
def test_fused_optimizers_read_gradients_in_the_layout_of_the_weights(build):
    def run(fused):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 4))
        model.to(memory_format=torch.channels_last)
        model[2].weight = nn.Parameter(torch.randn(8 * 4, 4).t())
        optimizer = Whitened(build(model.parameters(), lr=0.1, fused=fused, foreach=False), model)
        backward(model, torch.randn(4, 3, 4, 4))
        optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert relative_error(run(True), run(False)) <= 1e-12


def test_two_wrappers_on_disjoint_parameters():
    model, other = network(), network()
    first, second = (Whitened(sgd(layer), model, every=1) for layer in (model[0], model[2]))
    first.register_step_post_hook(lambda *_: (second.step(), second.zero_grad()))
    batches = [inputs(seed) for seed in range(3)]
    assert same(stepped(model, first, *batches), stepped(other, Whitened(sgd(other), other, every=1), *batches))


def step_within_autocast(build, enabled: bool):
    torch.manual_seed(0)
    model, x = nn.Linear(20, 10).float(), torch.randn(64, 20).float()
    optimizer = build(torch.optim.SGD(model.parameters(), lr=0.1), model)
    backward(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        optimizer.step()
        product = model.weight @ x.T
    return model.weight.detach(), product


@pytest.mark.parametrize("build", [Whitened, Preconditioned])
def test_step_within_autocast_rounds_no_map(build):
    (found, rounded), (wanted, product) = (step_within_autocast(build, enabled) for enabled in (True, False))
    assert torch.equal(found, wanted)
    assert relative_error(rounded.float(), product) > 1e-4  # as products of maps would be


@pytest.mark.parametrize("groups", [1, 8])
def test_weights_in_another_order_in_memory_step_alike_where_they_are_read(groups):
    """Those of 1×1 and depthwise convolutions have strides that no reshape keeps."""

    def run(memory_format):
        torch.manual_seed(0)
        size = 1 if groups == 1 else 3
        model = nn.Conv2d(8, 8, size, groups=groups, bias=False).to(memory_format=memory_format)
        optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), model, rank=2)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model, torch.randn(4, 8, 5, 5).to(memory_format=memory_format))
            optimizer.step()
        return model.weight.detach()

    assert relative_error(run(torch.channels_last), run(torch.contiguous_format)) <= 1e-12


def test_dead_input_keeps_its_own_coordinates():
    model = nn.Linear(3, 2, bias=False)
    before, optimizer = model.weight.detach().clone(), Whitened(sgd(model), model)
    backward(model, torch.zeros(4, 3))
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()
    assert relative_error(before - model.weight.detach(), torch.full((2, 3), 0.1)) <= 1e-12
