"""Telling parameters that are split over processes from those that are whole."""

from torch import nn


def refuse_sharded(what: str, model: nn.Module, remedy: str) -> None:
    """Raise a ValueError that names the first parameter of `model` that no process holds as a whole.

    Args:
        what: opens the message.
        model: any module; its parameters may be DTensors (`fully_shard`) or flattened (FullyShardedDataParallel).
        remedy: ends the message.
    """
    for path, parameter in model.named_parameters():
        kind = type(parameter).__name__
        if hasattr(parameter, "device_mesh") or kind == "FlatParameter":
            raise ValueError(f"{what}: parameter {path!r} is sharded (a {kind}), and no process holds it; {remedy}.")
