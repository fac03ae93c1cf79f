"""Steps on W' = s W, taken on W by another rate."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_optim import InputScaled
from adiv_optim.optim import unread
from adiv_optim.optim.rates import AtRates, rated_by_step
from tests.helpers.cases import relative_error
from tests.helpers.optimizers import OPTIMIZERS, Configuration, configurations
from tests.helpers.unit_consistent import BATCHES, mlp, train

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12
#: s of every parameter; 1 is no factor.
FACTORS = [3.0, 1.0, 0.5, 7.0]


def after(configuration: Configuration, by_rate: bool) -> tuple[list[Tensor], Optimizer]:
    """The weights after three steps on W' = s W with the gradient G / s, on W' itself or by rates."""
    model = configuration.network()
    parameters = list(model.parameters())
    factors = dict(zip(parameters, FACTORS, strict=False))
    optimizer = configuration.build(parameters)
    rates = {id(p): factor for p, factor in factors.items() if factor != 1}
    for scale in (1.0, -0.5, 0.2):
        gradients = [scale * (1 + torch.arange(p.numel()).view_as(p) * 1e-2) for p in parameters]
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        with torch.no_grad():
            if by_rate:
                at = AtRates(optimizer, rates)
                at.enter()
                optimizer.step()
                at.leave()
                assert all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))
                continue
            for p, factor in factors.items():
                p.grad = p.grad / factor
                p.mul_(factor)
            optimizer.step()
            for p, factor in factors.items():
                p.div_(factor)
    return [p.detach() for p in parameters], optimizer


def difference(configuration: Configuration) -> float:
    (ones, _), (others, _) = after(configuration, True), after(configuration, False)
    return max(relative_error(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "SparseAdam"])
def test_steps_by_the_rate_are_those_of_mapped_weights_where_that_is_claimed(name):
    for configuration in configurations(name):
        _, optimizer = after(configuration, True)
        if rated_by_step(optimizer):
            assert difference(configuration) <= EXACT, configuration


def test_steps_that_are_no_multiple_of_the_rate_would_be_others():
    assert difference(configurations("Adafactor")[0]) > 1e-3


def test_it_is_claimed_of_steps_that_are_known_and_taken_one_by_one():
    weight = nn.Parameter(torch.ones(2, 2))

    def claimed(kind: type, **options: bool) -> bool:
        return rated_by_step(kind([weight], lr=0.1, **options)) == {id(weight)}

    assert claimed(torch.optim.AdamW)
    assert claimed(torch.optim.SGD, weight_decay=0.1, foreach=False)
    assert not claimed(torch.optim.AdamW, foreach=True)
    assert not claimed(torch.optim.AdamW, fused=True)
    assert not claimed(torch.optim.Rprop)
    assert not claimed(type("Own", (torch.optim.SGD,), {}))
    elsewhere = nn.Parameter(torch.ones(2, 2, device="meta"))
    assert not rated_by_step(torch.optim.SGD([elsewhere], lr=0.1))


def test_what_an_error_leaves_is_as_it_was_and_groups_are_the_users_own():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5}], lr=0.1)
    for p in weights:
        p.grad = torch.ones(2)
    gradients, groups, held = [p.grad for p in weights], optimizer.param_groups, copy.copy(optimizer.param_groups[0])
    at = AtRates(optimizer, {id(weights[0]): 2.0, id(weights[2]): 4.0})
    at.enter()
    rates = []
    for group in optimizer.param_groups:
        rates.append(([id(p) for p in group["params"]], group["lr"]))
        with torch.no_grad():
            group["params"][0].mul_(3.0)
        if group["params"][0] is weights[2]:
            assert weights[2].grad.tolist() == [0.25, 0.25]
            break  # as an error does
    with torch.no_grad():
        at.restore()
    first, second, third = map(id, weights)
    assert rates == [([second], 0.1), ([first], 0.05), ([third], 0.125)]
    assert [p[0].item() for p in weights] == [3.0, 3.0, 1.0]
    assert all(p.grad is gradient for p, gradient in zip(weights, gradients, strict=True))
    assert optimizer.param_groups is groups
    assert groups[0] == held


def test_groups_may_be_looked_at_without_a_step():
    """Adam does so where there is an accelerator, and looks no further than the first that is not capturable."""

    class Looks(torch.optim.Adam):
        def step(self, closure=None):
            assert not all(group["capturable"] for group in self.param_groups)
            return super().step(closure)

    def path(kind: type, patch: pytest.MonkeyPatch) -> list[Tensor]:
        patch.setattr(unread, "_KNOWN", {kind})
        torch.manual_seed(0)
        model = mlp()
        weights, others = ([p for p in model.parameters() if (p.dim() > 1) == own] for own in (True, False))
        groups = [{"params": weights}, {"params": others}]
        train(model, InputScaled(kind(groups, lr=0.01), model, floor=0.01), BATCHES)
        return [tensor for p in model.parameters() for tensor in (p.detach(), p.grad)]

    with pytest.MonkeyPatch.context() as patch:
        ones, others = path(Looks, patch), path(torch.optim.Adam, patch)
    assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_input_scaled_by_the_rate_takes_the_step_of_mapped_weights(kind, monkeypatch):
    def path(known: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = InputScaled(kind(model.parameters(), lr=0.01, weight_decay=0.5), model, floor=0.01)
        seen = []
        with monkeypatch.context() as patch:
            if not known:
                patch.setattr(unread, "_KNOWN", set())
            patch.setattr(kind, "step", _spied(kind.step, lambda each: seen.append(type(each.param_groups) is list)))
            train(model, optimizer, BATCHES)
        assert seen == [not known] * len(BATCHES)
        return [p.detach() for p in model.parameters()]

    for one, other in zip(path(True), path(False), strict=True):
        assert relative_error(one, other) <= EXACT


def _spied(step, look):
    def spied(self, closure=None):
        look(self)
        return step(self, closure)

    return spied
