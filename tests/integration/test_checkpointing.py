"""Resuming in the middle of training from what torch.distributed.checkpoint has saved; other files resume elsewhere."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

from tests.helpers import checkpoints
from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    METHODS,
    built,
    deviation,
    each_method,
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


def save_whole(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """The optimizer's state as one object: what wrappers remember has shapes that a new one does not know yet."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    checkpoint.save({"model": model.state_dict(), "optimizer": buffer}, checkpoint_id=folder)


def load_whole(model: nn.Module, optimizer: Any, folder: Path) -> None:
    found = {"model": model.state_dict(), "optimizer": io.BytesIO()}
    checkpoint.load(found, checkpoint_id=folder)
    found["optimizer"].seek(0)
    optimizer.load_state_dict(torch.load(found["optimizer"], weights_only=True))


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


@each_method
def test_distributed_checkpoint(method, tmp_path):
    assert deviation(resumed(method, save_whole, load_whole, tmp_path), uninterrupted(method)) == 0


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
