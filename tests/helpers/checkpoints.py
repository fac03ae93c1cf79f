"""Saving and loading by torch.distributed.checkpoint, as its documentation says to."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Parameters and optimizer state by the parameters' names, sharded where they are."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def save(model: nn.Module, optimizer: Any, folder: Path) -> None:
    checkpoint.save(state(model, optimizer), checkpoint_id=folder)


def load(model: nn.Module, optimizer: Any, folder: Path) -> None:
    found = state(model, optimizer)
    checkpoint.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
