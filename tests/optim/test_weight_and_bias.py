"""Weight and bias are mapped together where one group holds them and both have gradients; else what moves is told."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import SGD

from adiv_optim import Preconditioned, Whitened
from tests.helpers.cases import relative_error
from tests.helpers.inputs import mean_of

pytestmark = pytest.mark.usefixtures("in_float64")

WRAPPERS = {"whitened": Whitened, "preconditioned": Preconditioned}
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
INPUTS = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1


def twins() -> list[nn.Linear]:
    first, second = nn.Linear(4, 3), nn.Linear(4, 3)
    second.load_state_dict(first.state_dict())
    return [first, second]


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 3) -> list[Tensor]:
    for _ in range(steps):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@each_wrapper
def test_a_bias_in_another_group_takes_the_plain_step(wrapper):
    model, plain = twins()
    optimizer = wrapper(SGD([{"params": [p]} for p in model.parameters()], lr=0.1), model)
    weight, bias = trained(optimizer, model, 1)
    plain_weight, plain_bias = trained(SGD(plain.parameters(), lr=0.1), plain, 1)
    assert torch.equal(bias, plain_bias)
    assert relative_error(weight, plain_weight) > 1e-3
    assert optimizer.coverage().skipped == {"bias": "a bias in another parameter group than its weight"}
    (a,) = mean_of(optimizer.method.layers[0])
    assert relative_error(a, INPUTS.T @ INPUTS / 9) <= 1e-14  # of the inputs, with no 1 beside them


@each_wrapper
@pytest.mark.parametrize("without", ["weight", "bias"])
def test_a_layer_of_which_one_has_no_gradient_takes_the_plain_step(wrapper, without):
    model, plain = twins()
    optimizer, other = (
        make(SGD(net.parameters(), lr=0.1), net) for make, net in ((wrapper, model), (lambda inner, _: inner, plain))
    )
    trained(optimizer, model, 1)
    plain.load_state_dict(model.state_dict())
    for net, own in ((model, optimizer), (plain, other)):
        own.zero_grad()
        net(INPUTS).square().mean().backward()
        net.get_parameter(without).grad = None
        own.step()
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(model.bias, plain.bias)
    # Both have gradients again.
    found, wanted = trained(optimizer, model, 1), trained(other, plain, 1)
    assert all(relative_error(one, other) > 1e-3 for one, other in zip(found, wanted, strict=True))


@each_wrapper
def test_a_bias_that_is_frozen_later_stays_and_its_weight_is_measured_without_it(wrapper):
    model, _ = twins()
    optimizer: Any = wrapper(SGD(model.parameters(), lr=0.1), model, every=2)
    trained(optimizer, model)
    model.bias.requires_grad_(False)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    trained(optimizer, model, 6)
    assert torch.equal(model.bias, bias)
    assert not torch.equal(model.weight, weight)
    assert optimizer.coverage().treated.keys() == {"weight"}
    assert optimizer.method.layers[0].moments.size == 4


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


@each_wrapper
def test_a_layer_that_is_parametrized_since_takes_plain_steps(wrapper):
    model, plain = twins()
    optimizer = wrapper(SGD(model.parameters(), lr=0.1), model)
    trained(optimizer, model)
    plain.load_state_dict(model.state_dict())
    other = SGD(plain.parameters(), lr=0.1)
    for net in (model, plain):
        parametrize.register_parametrization(net, "weight", Double())
    for ours, wanted in zip(trained(optimizer, model, 2), trained(other, plain, 2), strict=True):
        assert torch.equal(ours, wanted)
    assert "parametrizations.weight.original" in optimizer.coverage().skipped
