"""Checkpoints, copies and pickles of a wrapper: training goes on bit for bit."""

import copy
import pickle

import pytest
import torch

from adiv_optim.optim import OptimizerWrapper
from tests.helpers.revive import through_a_file
from tests.optim.test_wrapper import (
    assert_same_parameters,
    batches,
    each_optimizer,
    each_wrapper,
    train,
    wrapped,
)


@each_wrapper
@each_optimizer
def test_checkpoint_loads_into_the_bare_optimizer_and_back(wrap, build):
    model, optimizer = wrapped(wrap, build)
    train(model, optimizer, batches(2))
    bare = build(model.parameters())
    bare.load_state_dict(optimizer.state_dict())
    again = build(model.parameters())
    assert_same_state(bare.state_dict(), optimizer.state_dict())
    wrapper = OptimizerWrapper(again)
    wrapper.load_state_dict(bare.state_dict())
    assert_same_state(wrapper.state_dict(), optimizer.state_dict())


def assert_same_state(one, other):
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for key, entry in one["state"].items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["state"][key][name]))


@each_wrapper
@each_optimizer
def test_resume_is_bit_exact(wrap, build):
    xs = batches(6)
    torch.manual_seed(2)
    whole, optimizer = wrapped(wrap, build)
    start = copy.deepcopy(whole.state_dict())
    train(whole, optimizer, xs)
    first, optimizer = wrapped(wrap, build)
    first.load_state_dict(start)
    train(first, optimizer, xs[:3])
    checkpoint = through_a_file({"model": first.state_dict(), "optimizer": optimizer.state_dict()})
    second, optimizer = wrapped(wrap, build)
    second.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(second, optimizer, xs[3:])
    assert_same_parameters(second, whole)


TOGETHER = {"deepcopy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair))}


@each_wrapper
@each_optimizer
@pytest.mark.parametrize("duplicate", TOGETHER.values(), ids=TOGETHER)
def test_copy_of_model_and_optimizer_goes_on_bit_exactly_and_apart(wrap, build, duplicate):
    xs = batches(6)
    model, optimizer = wrapped(wrap, build)
    train(model, optimizer, xs[:3])
    twin, twin_optimizer = duplicate((model, optimizer))
    frozen = copy.deepcopy(twin)
    train(model, optimizer, xs[3:])
    assert_same_parameters(twin, frozen)
    train(twin, twin_optimizer, xs[3:])
    assert_same_parameters(twin, model)
    assert isinstance(twin_optimizer, type(optimizer))
    assert twin_optimizer.param_groups is twin_optimizer.inner.param_groups
    assert repr(twin_optimizer) == repr(optimizer)


def test_wrappers_nest():
    model, inner = wrapped()
    optimizer = OptimizerWrapper(inner)
    assert optimizer.param_groups is inner.inner.param_groups
    twin, twin_optimizer = copy.deepcopy((model, inner))
    train(model, optimizer, batches(2))
    train(twin, twin_optimizer, batches(2))
    assert_same_parameters(model, twin)
