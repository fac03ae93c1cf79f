"""What is in the state of the optimizer inside, and layers that are called at some steps alone."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from adiv_optim import Whitened
from tests.helpers.remembered import remembered
from tests.helpers.steps import each_by_inputs, inputs, network, same, sgd, stepped, weights

pytestmark = pytest.mark.usefixtures("in_float64")


def test_a_step_at_rate_0_with_gradients_is_a_step():
    model = network()
    optimizer = Whitened(sgd(model, lr=0.0), model)
    stepped(model, optimizer, *map(inputs, range(2)))
    assert remembered(optimizer)["0.weight"]["steps"] == 2


def test_the_optimizer_inside_steps_with_its_own_state_alone_and_takes_what_is_saved():
    """A name of ours in the state of a weight that it has not stepped on would be a state for it, and lack moments."""
    model = network()
    model[2].requires_grad_(False)
    optimizer = Whitened(AdamW(model.parameters()), model)
    stepped(model, optimizer, inputs(0))
    model[2].requires_grad_(True)
    stepped(model, optimizer, *map(inputs, range(1, 3)))
    assert optimizer.inner.state[model[0].weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    model.append(nn.Linear(3, 2))  # that has no gradient yet
    optimizer.inner.param_groups[0]["params"] += model[3].parameters()
    stepped(model[:3], optimizer, inputs(3))
    assert "3.weight" in optimizer.coverage().never_seen
    assert model[3].weight not in optimizer.state
    assert 4 not in optimizer.state_dict()["state"]
    bare = AdamW(model.parameters())
    bare.load_state_dict(optimizer.state_dict())
    stepped(model, bare, inputs(4))


def heads() -> nn.ModuleList:
    """Two that take turns."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(4, 3) for _ in range(2))


def taken(model: nn.ModuleList, optimizer: Any, head: int) -> None:
    optimizer.zero_grad()
    model[head](torch.eye(4)).square().sum().backward()
    optimizer.step()


@each_by_inputs
def test_rows_that_zero_grad_has_dropped_do_not_wait_for_their_layers_turn(wrapper):
    found = []
    for size in (0.0, 1000.0):
        model = heads()
        optimizer = wrapper(sgd(model), model, every=1)
        if size:
            model[1](size * torch.ones(8, 4)).sum().backward()  # a step that is skipped
        taken(model, optimizer, 0)
        taken(model, optimizer, 1)
        found.append(weights(model))
    assert same(*found)


def test_a_layer_that_is_first_called_after_a_resume_is_not_said_to_be_used_without_a_call():
    model = heads()
    optimizer = Whitened(sgd(model, lr=0.01), model, every=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            taken(model, optimizer, 0)
        twin = heads()
        resumed = Whitened(sgd(twin, lr=0.01), twin, every=10)
        resumed.load_state_dict(optimizer.state_dict())
        for _ in range(3):
            taken(twin, resumed, 1)
    assert resumed.coverage().never_seen["1.weight"] == "nothing measured yet, 5 columns"
