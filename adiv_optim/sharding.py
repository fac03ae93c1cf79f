"""Telling models whose weights are split over processes from those whose weights are whole."""

from torch import nn


def refuse_sharded(what: str, model: nn.Module, remedy: str) -> None:
    """Raise a ValueError if a part of `model` is sharded, so that no process holds its weights.

    Args:
        what: opens the message.
        model: any module; `fully_shard` makes DTensors of parameters, FullyShardedDataParallel flattens them.
        remedy: ends the message.
    """
    for path, module in model.named_modules():
        flat = type(module).__name__ == "FullyShardedDataParallel"
        if flat or any(hasattr(parameter, "device_mesh") for parameter in module.parameters(recurse=False)):
            where, how = f"module {path!r}" if path else "the model", "flat" if flat else "DTensor"
            raise ValueError(f"{what}: {where} has sharded parameters ({how}), which no process holds; {remedy}.")
