"""Weight and bias are mapped together where both have gradients; else what moves is told."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import SGD

from adiv_optim import Preconditioned, Whitened
from tests.helpers.cases import relative_error
from tests.helpers.steps import same, sgd, stepped

pytestmark = pytest.mark.usefixtures("in_float64")

WRAPPERS = {"whitened": Whitened, "preconditioned": Preconditioned}
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
INPUTS = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1


def twins() -> list[nn.Linear]:
    first, second = nn.Linear(4, 3), nn.Linear(4, 3)
    second.load_state_dict(first.state_dict())
    return [first, second]


def groups(model: nn.Linear, weight: dict[str, float], bias: dict[str, float]) -> list[dict[str, Any]]:
    return [{"params": [model.weight], **weight}, {"params": [model.bias], **bias}]


@each_wrapper
def test_where_one_of_two_groups_has_a_learning_rate_of_0_what_is_to_stay_stays(wrapper):
    model, plain = twins()
    optimizer = wrapper(SGD(groups(model, {"lr": 0.1}, {"lr": 0.0})), model)
    with nullcontext() if wrapper is Preconditioned else pytest.warns(UserWarning, match="learning rate of 0"):
        weight, bias = stepped(model, optimizer, INPUTS)
    assert torch.equal(bias, plain.bias)
    (moved, _) = stepped(plain, sgd(plain), INPUTS)
    # Preconditioned moves no weights: its gradient goes on to the group that has a rate.
    assert torch.equal(weight, moved) == (wrapper is Whitened)
    assert not optimizer.coverage().skipped
    stepped(model, optimizer, INPUTS)  # it is told once: warnings are errors


@each_wrapper
@pytest.mark.parametrize("without", ["weight", "bias"])
def test_a_layer_of_which_one_has_no_gradient_takes_the_plain_step(wrapper, without):
    model, plain = twins()
    optimizer, other = wrapper(sgd(model), model), sgd(plain)
    stepped(model, optimizer, INPUTS)
    plain.load_state_dict(model.state_dict())
    for net, own in ((model, optimizer), (plain, other)):
        own.zero_grad()
        net(INPUTS).square().mean().backward()
        net.get_parameter(without).grad = None
        own.step()
    assert same(model.parameters(), plain.parameters())
    # Both have gradients again.
    found, wanted = stepped(model, optimizer, INPUTS), stepped(plain, other, INPUTS)
    assert all(relative_error(one, other) > 1e-3 for one, other in zip(found, wanted, strict=True))


@each_wrapper
def test_a_bias_that_is_frozen_later_stays_and_its_weight_is_measured_without_it(wrapper):
    model, _ = twins()
    optimizer: Any = wrapper(sgd(model), model, every=2)
    stepped(model, optimizer, *[INPUTS] * 3)
    model.bias.requires_grad_(False)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    stepped(model, optimizer, *[INPUTS] * 6)
    assert torch.equal(model.bias, bias)
    assert not torch.equal(model.weight, weight)
    assert optimizer.coverage().treated.keys() == {"weight"}
    assert optimizer.coverage().skipped == {"bias": "frozen"}
    assert optimizer.coverage().treated["weight"].endswith(", 4 columns")


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


@each_wrapper
def test_a_layer_that_is_parametrized_since_takes_plain_steps(wrapper):
    model, plain = twins()
    optimizer = wrapper(sgd(model), model)
    stepped(model, optimizer, *[INPUTS] * 3)
    plain.load_state_dict(model.state_dict())
    other = sgd(plain)
    for net in (model, plain):
        parametrize.register_parametrization(net, "weight", Double())
    assert same(stepped(model, optimizer, INPUTS, INPUTS), stepped(plain, other, INPUTS, INPUTS))
    skipped = optimizer.coverage().skipped
    assert [skipped[name] for name in ("parametrizations.weight.original", "bias")] == ["parametrized"] * 2
