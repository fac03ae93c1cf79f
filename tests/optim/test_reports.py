"""What wrappers say of the parameters that their optimizer trains: by the parameter, not by its name."""

import pytest
import torch
from torch import nn

from tests.helpers.steps import BY_CLASS, each_by_inputs, network, sgd, stepped

X = torch.linspace(-1, 1, 32).view(8, 4)
OUTSIDE = "no parameter of the model that was wrapped"


@each_by_inputs
def test_a_weight_that_was_reassigned_is_not_said_to_be_treated(wrapper):
    model = network(4, 6, 3)
    opt = wrapper(sgd(model), model)
    stepped(model, opt, X)
    assert "2.weight" in opt.coverage().treated
    model[2].weight = nn.Parameter(torch.zeros(3, 6))
    found = opt.coverage()
    assert "2.weight" not in found.treated
    assert found.skipped["param_groups[0]['params'][2]"] == OUTSIDE
    opt.param_groups[0]["params"][2] = model[2].weight  # by hand
    found = opt.coverage()
    assert "wrap the optimizer again" in found.skipped["2.weight"]
    before = model[2].weight.detach().clone()
    stepped(model, opt, X)
    assert torch.allclose(model[2].weight.detach(), before - 0.1 * model[2].weight.grad)  # the plain step, as it says


@each_by_inputs
def test_a_group_that_was_emptied_by_hand_leaves_nothing_to_report(wrapper):
    model = network(4, 6, 3)
    opt = wrapper(sgd(model), model)
    stepped(model, opt, X)
    del opt.param_groups[0]["params"][2:]
    assert set(opt.coverage().elements) == {"0.weight", "0.bias"}
    name = type(opt).__name__
    assert opt.metrics()[f"{name}/treated_elements"] == opt.coverage().element_share >= 24 / 30


@pytest.mark.parametrize("name", BY_CLASS)
def test_an_optimizer_that_trains_more_than_the_model_says_so(name):
    head, body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), nn.Linear(40, 40)
    with pytest.warns(UserWarning, match=OUTSIDE):
        opt = BY_CLASS[name](torch.optim.SGD([*head.parameters(), *body.parameters()], lr=0.1), head)
    found = opt.coverage()
    assert sum(found.elements.values()) == sum(p.numel() for m in (head, body) for p in m.parameters())
    assert [name for name, why in found.skipped.items() if why == OUTSIDE] == [
        "param_groups[0]['params'][4]", "param_groups[0]['params'][5]",
    ]  # fmt: skip
    assert found.element_share < 0.1
