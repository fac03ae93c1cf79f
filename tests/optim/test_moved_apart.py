"""Weight and bias of one layer that do not move together: the layer takes plain steps, and nothing else moves."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from adiv_optim import Preconditioned, Whitened

pytestmark = pytest.mark.usefixtures("in_float64")

WRAPPERS = {"whitened": Whitened, "preconditioned": Preconditioned}
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
WORDS = "of weight and bias one has a rate of 0 or no gradient"


def groups(model: nn.Linear, **rates: float) -> list[dict]:
    return [{"params": [p], "lr": rates.get(name, 0.1)} for name, p in model.named_parameters()]


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, x: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def twins(*sizes: int) -> list[nn.Linear]:
    first, second = nn.Linear(*sizes), nn.Linear(*sizes)
    second.load_state_dict(first.state_dict())
    return [first, second]


@each_wrapper
@pytest.mark.parametrize("still", ["weight", "bias"])
def test_what_has_a_rate_of_0_stays_where_it_is(wrapper, still):
    (model, plain), x = twins(4, 3), torch.randn(9, 4) + 1
    before = model.get_parameter(still).detach().clone()
    optimizer = wrapper(torch.optim.AdamW(groups(model, **{still: 0.0})), model)
    with pytest.warns(UserWarning, match=f"takes plain steps with weight, bias: {WORDS}") as told:
        found = trained(optimizer, model, x)
    assert len(told) == 1
    assert torch.equal(model.get_parameter(still), before)
    for ours, wanted in zip(found, trained(torch.optim.AdamW(groups(plain, **{still: 0.0})), plain, x), strict=True):
        assert torch.equal(ours, wanted)
    assert optimizer.coverage().skipped == {"weight": WORDS, "bias": WORDS}


@each_wrapper
@pytest.mark.filterwarnings("ignore:.*takes plain steps")
def test_once_both_move_they_move_in_coordinates_again(wrapper):
    (model, plain), x = twins(4, 3), torch.randn(9, 4) + 1
    optimizer = wrapper(torch.optim.SGD(groups(model, bias=0.0)), model)
    trained(optimizer, model, x)
    optimizer.param_groups[1]["lr"] = 0.1
    plain.load_state_dict(model.state_dict())
    pairs = zip(trained(optimizer, model, x, 1), trained(torch.optim.SGD(groups(plain)), plain, x, 1), strict=True)
    assert all((ours - other).abs().max() > 1e-3 for ours, other in pairs)
    assert optimizer.coverage().treated.keys() == {"weight", "bias"}


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_the_step_is_taken():
    model, x = nn.Linear(4, 3), torch.randn(9, 4)
    optimizer = Whitened(torch.optim.SGD(groups(model, bias=0.0)), model)
    model(x).square().mean().backward()
    wanted = model.weight.detach() - 0.1 * model.weight.grad
    with pytest.raises(UserWarning, match=WORDS):
        optimizer.step()
    assert torch.equal(model.weight, wanted)


def test_different_rates_above_0_are_no_reason():
    model, x = nn.Linear(4, 3), torch.randn(9, 4)
    optimizer = Whitened(torch.optim.SGD(groups(model, bias=0.2)), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(optimizer, model, x)
    assert optimizer.coverage().parameter_share == 1


@each_wrapper
def test_penalty_that_leaves_the_bias_without_a_gradient_is_a_plain_step(wrapper):
    (model, plain), x = twins(4, 3), torch.randn(9, 4)
    optimizers = (
        wrapper(torch.optim.SGD(model.parameters(), lr=0.1), model),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    trained(optimizers[0], model, x)
    plain.load_state_dict(model.state_dict())
    for net, optimizer in zip((model, plain), optimizers, strict=True):
        optimizer.zero_grad()
        y = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(y).square().sum(), y, create_graph=True)
        slope.square().sum().backward(inputs=[net.weight])
        if optimizer is optimizers[0]:
            with pytest.warns(UserWarning, match=WORDS):
                optimizer.step()
        else:
            optimizer.step()
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(model.bias, plain.bias)
    trained(optimizers[0], model, x)
    assert optimizers[0].coverage().parameter_share == 1


@each_wrapper
def test_bias_that_is_frozen_later_stays_where_it_is(wrapper):
    model, x = nn.Linear(4, 3), torch.randn(9, 4) + 1
    optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.1), model)
    trained(optimizer, model, x)
    model.bias.requires_grad_(False)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    with pytest.warns(UserWarning, match=WORDS):
        trained(optimizer, model, x)
    assert torch.equal(model.bias, bias)
    assert not torch.equal(model.weight, weight)


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


@each_wrapper
def test_a_layer_that_is_parametrized_since_takes_plain_steps(wrapper):
    (model, plain), x = twins(4, 3), torch.randn(9, 4)
    optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.1), model)
    trained(optimizer, model, x)
    plain.load_state_dict(model.state_dict())
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for net in (model, plain):
        parametrize.register_parametrization(net, "weight", Double())
    for ours, wanted in zip(trained(optimizer, model, x, 2), trained(other, plain, x, 2), strict=True):
        assert torch.equal(ours, wanted)
    assert "parametrizations.weight.original" in optimizer.coverage().skipped
