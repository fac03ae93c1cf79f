"""OptimizerWrapper itself: it hands everything to the optimizer within. What each wrapper keeps is in test_contract."""

import copy
from functools import partial

import pytest
import torch
from torch.optim import SGD

from adiv_optim import ChainedOptimizer
from adiv_optim.optim import OptimizerWrapper
from tests.helpers.steps import BY_CLASS, network


def wrapped():
    model = network()
    return model, OptimizerWrapper(SGD(model.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.parametrize("kind", [OptimizerWrapper, *(partial(wrap) for wrap in BY_CLASS.values())])
def test_wrappers_do_not_nest(kind):
    model, within = wrapped()
    with pytest.raises(TypeError, match=r"cannot wrap OptimizerWrapper: .*attach\(model, correction\)"):
        kind(within) if kind is OptimizerWrapper else kind(within, model)


def test_parts_can_be_set_and_are_set_on_the_inner_optimizer():
    _, optimizer = wrapped()
    for name in ("param_groups", "state", "defaults"):
        value = copy.copy(getattr(optimizer, name))
        setattr(optimizer, name, value)
        assert getattr(optimizer.inner, name) is value


def test_gradients_are_cleared_by_an_optimizer_that_takes_no_argument_for_it():
    """As Apex's FusedAdam."""
    kind = type("NoArgument", (SGD,), {"zero_grad": lambda self: SGD.zero_grad(self)})
    model = network()
    for optimizer in (OptimizerWrapper(kind(model.parameters())), ChainedOptimizer([kind(model.parameters())])):
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.zero_grad()
        assert model[0].weight.grad is None


def test_a_step_in_inference_mode_is_refused():
    _, optimizer = wrapped()
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"call step\(\) outside of it, or under torch.no_grad"),
    ):
        optimizer.step()


def test_state_dict_hooks_fire_once_and_may_replace():
    _, optimizer = wrapped()
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "extra": calls.append("save post")})
    optimizer.register_load_state_dict_pre_hook(
        lambda opt, state: calls.append("load pre") or {k: v for k, v in state.items() if k != "extra"}
    )
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("load post"))
    state = optimizer.state_dict()
    assert "extra" in state
    optimizer.load_state_dict(state)
    assert calls == ["save pre", "save post", "load pre", "load post"]
