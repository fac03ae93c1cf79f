"""`state` is the inner optimizer's own mapping: programs that read it, reset it or move moments in it find torch's."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from adiv_optim import ChainedOptimizer, Whitened
from tests.helpers.revive import through_a_file
from tests.helpers.steps import inputs, network, same, stepped, weights
from tests.wrappers import REMEMBERING, WRAPPERS, Wrapper, each_wrapper

pytestmark = pytest.mark.usefixtures("in_float64")

each_that_remembers = pytest.mark.parametrize("name", REMEMBERING)


def wrapped(wrap: Wrapper, steps: int = 3) -> tuple[nn.Sequential, Any]:
    model = network()
    optimizer = wrap(Adam(model.parameters(), lr=0.01), model, inputs(0))
    stepped(model, optimizer, *map(inputs, range(steps)))
    return model, optimizer


def chain(model: nn.Sequential) -> ChainedOptimizer:
    return ChainedOptimizer([Adam(model[0].parameters(), lr=0.01), Adam(model[2].parameters(), lr=0.01)])


@each_wrapper
def test_reading_it_adds_nothing_and_a_bare_optimizer_may_take_it(wrap: Wrapper):
    _, optimizer = wrapped(wrap)
    bare = Adam(network().parameters())
    bare.load_state_dict(
        {**optimizer.state_dict(), "state": {0: optimizer.state[optimizer.param_groups[0]["params"][0]]}}
    )
    assert optimizer.state is optimizer.inner.state
    assert {name for entries in optimizer.state.values() for name in entries} == {"step", "exp_avg", "exp_avg_sq"}
    assert all(entries.keys() == {"step", "exp_avg", "exp_avg_sq"} for entries in bare.state.values())


RESETS = {
    "setstate": lambda optimizer: optimizer.__setstate__({"state": defaultdict(dict)}),
    "assign": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "clear": lambda optimizer: optimizer.state.clear(),
}


@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
@each_wrapper
def test_a_reset_leaves_no_moment(wrap: Wrapper, reset: Any):
    model, optimizer = wrapped(wrap)
    reset(optimizer)
    assert not optimizer.inner.state
    stepped(model, optimizer, inputs(3))
    assert [int(entries["step"]) for entries in optimizer.state.values()] == [1, 1, 1, 1]


def one_of_two_groups(model: nn.Sequential) -> Adam:
    return Adam([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.01)


@pytest.mark.parametrize("reset", [*RESETS.values(), None], ids=[*RESETS, "nothing"])
def test_a_reset_of_a_chain_is_that_of_its_optimizers(reset: Any):
    ends = []
    for build in (chain, one_of_two_groups):
        model = network()
        optimizer: Any = build(model)
        stepped(model, optimizer, *map(inputs, range(3)))
        if reset:
            reset(optimizer)
        assert len(optimizer.state) == (0 if reset else 4)
        ends.append(stepped(model, optimizer, *map(inputs, range(3, 6))))
    assert same(*ends)


def test_moments_move_to_a_new_parameter_of_a_chain():
    """As programs that prune points do: the entry goes, the group gets the new parameter, the entry comes back."""
    ends = []
    for chained in (False, True):
        points = nn.ParameterList(inputs(seed, 8, 3) for seed in range(2))
        optimizer: Any = Adam([{"params": [p]} for p in points], lr=0.1)
        if chained:
            optimizer = ChainedOptimizer([Adam([p], lr=0.1) for p in points])
        sum(p.square().sum() for p in points).backward()
        optimizer.step()
        for place, group in enumerate(optimizer.param_groups):
            (old,) = group["params"]
            entry = optimizer.state.pop(old)
            assert old not in optimizer.state
            moments = {name: entry[name][::2].clone() for name in ("exp_avg", "exp_avg_sq")}
            points[place] = nn.Parameter(old.detach()[::2].clone())
            group["params"] = [points[place]]
            assert optimizer.state.setdefault(points[place], {**entry, **moments})["step"] == 1
        sum(p.square().sum() for p in points).backward()
        optimizer.step()
        assert len(optimizer.state) == 2
        assert [int(optimizer.state[p]["step"]) for p in points] == [2, 2]
        ends.append([p.detach() for p in points])
    assert same(*ends)


@each_wrapper
def test_a_number_that_an_optimizer_keeps_beside_its_parameters_is_loaded(wrap: Wrapper):
    _, optimizer = wrapped(wrap)
    optimizer.state["evaluations"] = 3
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["evaluations"] == 3


def test_a_chain_gives_numbers_back_to_the_optimizer_that_has_them_or_changes_nothing():
    optimizer = chain(network())
    optimizer.optimizers[1].state["evaluations"] = 3
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.optimizers[1].state["evaluations"] == 3
    other = chain(network())
    before = dict(other.state)
    with pytest.raises(KeyError, match="'evaluations'"):
        other.load_state_dict(optimizer.state_dict())
    assert dict(other.state) == before


def test_a_chain_refuses_the_state_of_a_parameter_that_none_of_its_groups_holds():
    optimizer = chain(network())
    with pytest.raises(KeyError, match=r"no group of its optimizers holds the parameter of shape \(2,\)"):
        optimizer.state[nn.Parameter(torch.ones(2))] = {}
    with pytest.raises(KeyError):
        optimizer.state.pop(nn.Parameter(torch.ones(2)))
    assert optimizer.state.pop(nn.Parameter(torch.ones(2)), None) is None


@each_that_remembers
def test_resume_is_exact_for_a_layer_that_was_seen_before_it_trained(name: str):
    """A head whose loss comes later has gradients of None until then, and its inputs are those of every pass."""

    def build() -> tuple[nn.Module, Any]:
        model = nn.ModuleDict({"body": network(4, 5, 3), "head": nn.Linear(3, 2)})
        forward = nn.Sequential(model["body"], model["head"])
        return forward, WRAPPERS[name](Adam(forward.parameters(), lr=0.01), forward, inputs(0))

    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        hidden = model[0](inputs(number))
        output = model[1](hidden)
        (output.square().mean() + hidden.square().mean()).backward()
        if number < 3:
            model[1].weight.grad = model[1].bias.grad = None
        optimizer.step()

    model, optimizer = build()
    for number in range(3):
        step(model, optimizer, number)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, resumed = build()
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for number in range(3, 8):
        step(model, optimizer, number)
        step(other, resumed, number)
    assert same(weights(other), weights(model))


def test_settings_that_are_numbers_of_numpy_are_saved_as_pythons():
    layer = nn.Linear(20, 3)
    settings = {"rank": np.int64(4), "max_dim": np.int64(30), "decay": np.float32(0.5)}
    optimizer = Whitened(SGD(layer.parameters(), lr=0.1, momentum=0.9), layer, **settings)
    stepped(layer, optimizer, inputs(0, 4, 20))
    state = through_a_file(optimizer.state_dict())
    state["param_groups"][0]["lr"] = np.float32(0.5)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5
