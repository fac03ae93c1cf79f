"""Resuming in the middle of training from what torch.distributed.checkpoint has saved, by names of parameters."""

from functools import partial
from pathlib import Path

import pytest
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import set_state_dict

from tests.helpers import checkpoints
from tests.helpers.loops import (
    DIFFERENT,
    METHODS,
    Method,
    built,
    deviation,
    each_method_by_name,
    elsewhere,
    images,
    train,
    weights,
)
from tests.wrappers import WRAPPERS

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    # torch's own, where no process group is there, and in 2.6.
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def uninterrupted(method):
    model, optimizer = built(method)
    train(model, optimizer, images())
    return weights(model)


def resumed(method, save, load, folder: Path):
    model, optimizer = built(method)
    train(model, optimizer, images()[:2])
    save(model, optimizer, folder)
    train(model, optimizer, images()[2:])
    assert deviation(weights(model), uninterrupted(method)) == 0  # saving changes nothing
    model, optimizer = built(method, elsewhere)
    load(model, optimizer, folder)
    train(model, optimizer, images()[2:])
    return weights(model)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@each_method_by_name
def test_distributed_checkpoint_by_parameter_names(name, flat, tmp_path):
    """As torchtitan keeps it: what a wrapper remembers is in the state of each parameter, bit for bit."""
    method = Method(WRAPPERS[name])
    save, load = (partial(function, flat=flat) for function in (checkpoints.save, checkpoints.load))
    assert deviation(resumed(method, save, load, tmp_path), uninterrupted(method)) == 0


def save_bare(model, optimizer, folder):
    checkpoints.save(model, optimizer.inner, folder)


def load_of_bare(model, optimizer, folder):
    found = checkpoints.state(model, optimizer.inner)
    checkpoint.load(found, checkpoint_id=folder)
    with pytest.warns(UserWarning, match="nothing of what it remembers of . of . parameters.*get_optimizer_state_dict"):
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


@pytest.mark.parametrize("name", ["input-scaled", "preconditioned", "whitened"])
def test_a_checkpoint_of_the_optimizer_inside_is_measured_anew_with_a_word(name, tmp_path):
    method = METHODS[name]
    found = resumed(method, save_bare, load_of_bare, tmp_path)
    assert deviation(found, uninterrupted(method)) > DIFFERENT
