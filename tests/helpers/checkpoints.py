"""Saving and loading by torch.distributed.checkpoint, as its documentation says to."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def state(model: nn.Module, optimizer: Any, averages: bool = True) -> dict[str, Any]:
    """Parameters and optimizer state by the parameters' names, sharded where they are."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    remembered = {"averages": optimizer.averages} if averages and hasattr(optimizer, "averages") else {}
    return {"model": of_model, "optimizer": of_optimizer, **remembered}


def save(model: nn.Module, optimizer: Any, folder: Path, averages: bool = True) -> None:
    checkpoint.save(state(model, optimizer, averages), checkpoint_id=folder)


def load(model: nn.Module, optimizer: Any, folder: Path, averages: bool = True) -> None:
    found = state(model, optimizer, averages)
    checkpoint.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
