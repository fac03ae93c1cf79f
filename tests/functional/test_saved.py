"""What a corrected layer keeps for its backward pass: the weight only where the input needs a gradient, as torch."""

import pytest
import torch
from torch import nn

from adiv_optim import BatchIdeal, Proportional, attach

RULES = [Proportional(), BatchIdeal()]


def network(rule=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    return model if rule is None else attach(model, rule)


def second_loss_behind_a_step(model, x):
    first, second = model(x).sum(), model(x).square().sum()
    first.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1
    model.zero_grad()
    second.backward()
    return model[0].weight.grad


@pytest.mark.parametrize("rule", [None, *RULES], ids=str)
def test_a_first_layer_may_be_stepped_on_between_two_losses(rule):
    x = torch.linspace(-1, 1, 12).view(4, 3)
    found = second_loss_behind_a_step(network(rule), x)
    whole = network(rule)
    whole(x).square().sum().backward()
    assert torch.equal(found, whole[0].weight.grad)


@pytest.mark.parametrize("rule", [None, *RULES], ids=str)
def test_a_layer_whose_input_needs_a_gradient_may_not(rule):
    x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second_loss_behind_a_step(network(rule), x)
