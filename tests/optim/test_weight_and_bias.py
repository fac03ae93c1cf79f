"""Weight and bias are mapped together where both have gradients; else what moves is told."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import SGD, AdamW

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


@pytest.mark.parametrize("inner", [AdamW, SGD], ids=["reads no weights", "reads weights"])
def test_weight_and_bias_of_two_groups_are_mapped_together_each_with_its_own_rate_and_decay(inner):
    model, plain = twins()
    slow, fast = {"lr": 0.01, "weight_decay": 0.3}, {"lr": 0.1, "weight_decay": 0.0}
    stepped(
        model, Whitened(inner(groups(model, slow, fast)), model, graft_norm=False, decay=0.0, every=1), INPUTS, INPUTS
    )
    # By hand: the optimizer steps on [W, b] R⁻¹, R being (A + λI) to the power of -1/2; decay that it adds to the
    # gradient is of what it steps on, decoupled decay of the weights themselves.
    rows = torch.cat([INPUTS, torch.ones(9, 1)], 1)
    a = rows.T @ rows / 9
    values, vectors = torch.linalg.eigh(a + a.trace() / 5 * torch.eye(5))
    root, inverse = (vectors * values**-0.5) @ vectors.T, (vectors * values**0.5) @ vectors.T
    there = nn.Linear(4, 3)
    stepper = inner(groups(there, {**slow, "weight_decay": 0.0} if inner is AdamW else slow, fast))
    for _ in range(2):
        plain.zero_grad()
        plain(INPUTS).square().mean().backward()
        both, slopes = (torch.cat([w, b[:, None]], 1) for w, b in ((plain.weight, plain.bias), gradients(plain)))
        before = both @ inverse
        with torch.no_grad():
            for part, value in ((there.weight, before[:, :4]), (there.bias, before[:, 4])):
                part.copy_(value)
            there.weight.grad, there.bias.grad = (slopes @ root)[:, :4].clone(), (slopes @ root)[:, 4].clone()
            stepper.step()
            step = (torch.cat([there.weight, there.bias[:, None]], 1) - before) @ root
            plain.weight.mul_(1 - 0.01 * 0.3 if inner is AdamW else 1.0).add_(step[:, :4])
            plain.bias.add_(step[:, 4])
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative_error(found, wanted) <= 1e-12


def gradients(layer: nn.Linear) -> tuple[Any, Any]:
    return layer.weight.grad, layer.bias.grad


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
    assert "parametrizations.weight.original" in optimizer.coverage().skipped
