"""Resuming in the middle of training from what torch.distributed.checkpoint has saved, by names of parameters."""

from functools import partial
from pathlib import Path

import pytest

from tests.helpers import checkpoints
from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    METHODS,
    built,
    deviation,
    each_method_by_name,
    elsewhere,
    images,
    train,
    weights,
)

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


@each_method_by_name
def test_distributed_checkpoint_by_parameter_names(name, tmp_path):
    """What shards: get_state_dict knows the inner optimizer's state, and `averages` the rest."""
    method = METHODS[name]
    found = resumed(method, checkpoints.save, checkpoints.load, tmp_path)
    assert deviation(found, uninterrupted(method)) <= EXACT


@pytest.mark.parametrize("name", ["input-scaled", "preconditioned", "whitened"])
def test_distributed_checkpoint_without_averages_forgets_them(name, tmp_path):
    method = METHODS[name]
    save, load = (partial(function, averages=False) for function in (checkpoints.save, checkpoints.load))
    found = resumed(method, save, load, tmp_path)
    assert deviation(found, uninterrupted(method)) > DIFFERENT
