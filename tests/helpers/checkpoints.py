"""Saving and loading by torch.distributed.checkpoint, as its documentation says to."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


def forgotten(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict without what wrappers remember."""
    kept = {}
    for key, entries in state_dict["state"].items():
        if own := {name: value for name, value in entries.items() if not name.startswith("adiv_optim.")}:
            kept[key] = own
    return {**state_dict, "state": kept}


def state(model: nn.Module, optimizer: Any, flat: bool = False) -> dict[str, Any]:
    """Parameters and optimizer state by the parameters' names, sharded where they are."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return {"model": of_model, "optimizer": of_optimizer}


def save(model: nn.Module, optimizer: Any, folder: Path, flat: bool = False) -> None:
    checkpoint.save(state(model, optimizer, flat), checkpoint_id=folder)


def load(model: nn.Module, optimizer: Any, folder: Path, flat: bool = False) -> None:
    found, options = state(model, optimizer, flat), StateDictOptions(flatten_optimizer_state_dict=flat)
    checkpoint.load(found, checkpoint_id=folder)
    parts = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
    set_state_dict(model, optimizer, **parts, options=options)
