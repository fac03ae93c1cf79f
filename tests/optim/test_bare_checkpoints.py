"""A checkpoint that torch.distributed.checkpoint has of a bare optimizer goes into a wrapper."""

from typing import Any

import pytest
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.optim import Adam

from adiv_optim import Whitened
from tests.helpers.checkpoints import save, state
from tests.helpers.steps import inputs, network, same, stepped

pytestmark = pytest.mark.usefixtures("in_float64", "one_process")


def built(wrap: bool) -> tuple[nn.Module, Any]:
    model = network()
    inner = Adam(model.parameters(), lr=0.1)
    return model, Whitened(inner, model, every=1) if wrap else inner


def test_a_bare_optimizers_checkpoint_loads_in_part_and_the_wrapper_measures_anew(tmp_path):
    (bare, inner), (model, wrapper), whole = built(False), built(True), built(True)
    stepped(bare, inner, *map(inputs, range(3)))
    save(bare, inner, tmp_path)
    found = state(model, wrapper)  # torch has it take a step for its state, which counts
    with pytest.raises(checkpoint.api.CheckpointException, match=r"adiv_optim\."):
        checkpoint.load(found, checkpoint_id=tmp_path)
    checkpoint.load(found, checkpoint_id=tmp_path, planner=checkpoint.DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(model, wrapper, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    wanted = stepped(bare, Whitened(inner, bare, every=1), *map(inputs, range(3, 6)))  # around the optimizer itself
    assert same(stepped(model, wrapper, *map(inputs, range(3, 6))), wanted)
    assert not same(stepped(*whole, *map(inputs, range(6))), wanted)
