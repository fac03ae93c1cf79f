"""A checkpoint that torch.distributed.checkpoint has of a bare optimizer goes into a wrapper."""

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from adiv_optim import Whitened
from tests.helpers.steps import network, same, weights

pytestmark = pytest.mark.usefixtures("in_float64")


def state(model, optimizer):
    parts = get_state_dict(model, optimizer)
    return dict(zip(("model", "optimizer"), parts, strict=True))


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
        torch.nn.functional.cross_entropy(model(x), torch.arange(12) % 3).backward()
        optimizer.step()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.mark.usefixtures("one_process")
def test_a_bare_optimizers_checkpoint_loads_in_part_and_the_wrapper_measures_anew(tmp_path):
    bare = network(5, 8, 8, 3)
    inner = adam(bare)
    train(bare, inner, range(3))
    checkpoint.save(state(bare, inner), checkpoint_id=tmp_path)
    model = network(5, 8, 8, 3)
    wrapper = Whitened(adam(model), model, every=1)  # torch has it take a step for its state, which counts
    found = state(model, wrapper)
    with pytest.raises(checkpoint.api.CheckpointException, match=r"adiv_optim\."):
        checkpoint.load(found, checkpoint_id=tmp_path)
    checkpoint.load(found, checkpoint_id=tmp_path, planner=checkpoint.DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(model, wrapper, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    train(model, wrapper, range(3, 6))
    train(bare, Whitened(inner, bare, every=1), range(3, 6))  # around the optimizer itself
    assert same(weights(model), weights(bare))
    other = network(5, 8, 8, 3)
    train(other, Whitened(adam(other), other, every=1), range(6))
    assert not same(weights(other), weights(bare))
