"""Bringing a wrapped optimizer back."""

import copy
import io
import pickle
from typing import Any

import torch


def revived(optimizer: Any, fresh: Any) -> list[Any]:
    """The optimizer, its model included, as a checkpoint loaded into `fresh`, a copy and a pickle bring it back."""
    buffer = io.BytesIO()
    torch.save({"model": optimizer.model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    fresh.model.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    return [fresh, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
