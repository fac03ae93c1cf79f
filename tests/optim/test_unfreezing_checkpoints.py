"""Checkpoints of runs in which layers are frozen, and unfrozen later: on either side of the checkpoint."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from adiv_optim import InputScaled, Preconditioned, Whitened

pytestmark = pytest.mark.usefixtures("in_float64")

each_wrapper = pytest.mark.parametrize("wrapper", [Preconditioned, Whitened, InputScaled])
#: The step from which on the first layer trains.
THAWED, END = 4, 9


def built(wrapper: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model, wrapper(SGD(model.parameters(), lr=0.1, momentum=0.9), model, every=2)


def trained(model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    for step in steps:
        model[0].requires_grad_(step >= THAWED)
        optimizer.zero_grad()
        model(3 * torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@each_wrapper
@pytest.mark.parametrize("at", [THAWED - 1, THAWED + 1])
@pytest.mark.parametrize("once_more", [False, True], ids=["once", "twice"])
def test_a_run_goes_on_as_if_it_had_not_been_saved(wrapper, at, once_more):
    plain = trained(*built(wrapper), range(END))
    model, optimizer = built(wrapper)
    trained(model, optimizer, range(at))
    for _ in range(1 + once_more):  # by a script that freezes the layer before it loads
        resumed, twin = built(wrapper)
        resumed.load_state_dict(model.state_dict())
        twin.load_state_dict(optimizer.state_dict())
        model, optimizer = resumed, twin
    found = trained(model, optimizer, range(at, END))
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@each_wrapper
def test_an_optimizer_takes_what_it_saved_before_a_layer_was_unfrozen(wrapper):
    model, optimizer = built(wrapper)
    trained(model, optimizer, range(THAWED))
    before = optimizer.state_dict()
    trained(model, optimizer, range(THAWED, END))
    optimizer.load_state_dict(before)
    assert "0.weight" in optimizer.coverage().never_seen  # it is measured anew
    trained(model, optimizer, range(THAWED, END))
    assert "0.weight" in optimizer.coverage().treated


@each_wrapper
def test_layers_that_were_not_frozen_are_not_to_be_missing(wrapper):
    model, optimizer = built(wrapper)
    trained(model, optimizer, range(END))
    state = optimizer.state_dict()
    lost = state["method"]["layers"].pop("0.weight")
    with pytest.raises(ValueError, match=r"lacks '0\.weight'"):
        optimizer.load_state_dict(state)
    state["method"]["layers"] |= {"0.weight": lost, "5.weight": lost}
    with pytest.raises(ValueError, match=r"has an unknown '5\.weight'"):
        optimizer.load_state_dict(state)
    state["method"]["frozen"] = [["0.weight"]]
    with pytest.raises(ValueError, match=r"\['frozen'\] is .* wanted a list of names"):
        optimizer.load_state_dict(state)


@each_wrapper
def test_a_bias_that_trained_then_and_does_not_now_lets_its_layer_be_measured_anew(wrapper):
    model, optimizer = built(wrapper)
    trained(model, optimizer, range(END))
    resumed, twin = built(wrapper)
    twin.load_state_dict(optimizer.state_dict())
    resumed[0].weight.requires_grad_(True)
    for p in resumed.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    twin.step()
    treated = "0.weight" in twin.coverage().treated
    assert treated == (wrapper is InputScaled)  # which does not treat biases
