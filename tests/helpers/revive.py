"""Bringing a wrapped optimizer back."""

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def through_a_file(value: Any) -> Any:
    """What torch.load finds of what torch.save wrote."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def revived(optimizer: Any, fresh: Any) -> list[Any]:
    """The optimizer, its model included, as a checkpoint loaded into `fresh`, a copy and a pickle bring it back."""
    saved = through_a_file({"model": optimizer.model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh.model.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    return [fresh, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]


def leaves(optimizer: Any) -> list[Any]:
    """Weights, and everything that a checkpoint would hold."""
    return pytree.tree_leaves([optimizer.model.state_dict(), optimizer.state_dict()])


def same_leaves(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )
