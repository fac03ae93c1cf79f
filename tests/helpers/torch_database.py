"""The databases PyTorch tests its own optimizers and modules with; importing them leaves no trace."""

import inspect
import sys
import warnings
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch

#: Known without the import, which takes seconds: tests are named by them.
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


@cache
def optimizers() -> dict[str, Any]:
    """Name → torch.testing._internal.common_optimizers.OptimizerInfo."""
    return {info.name: info for info in _database("common_optimizers", "optim_db")}


@cache
def modules() -> dict[str, Any]:
    """Name → torch.testing._internal.common_modules.ModuleInfo."""
    return {info.name.removeprefix("nn."): info for info in _database("common_modules", "module_db")}


def _database(module: str, name: str) -> list[Any]:
    """Import a database. Undone is that this reads the command line, seeds torch, and forbids to set its flags."""
    pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
    state, arguments = torch.get_rng_state(), sys.argv
    sys.argv = sys.argv[:1]
    try:
        with warnings.catch_warnings(), torch.backends.__allow_nonbracketed_mutation():
            warnings.simplefilter("ignore")
            found: list[Any] = getattr(import_module(f"torch.testing._internal.{module}"), name)
            return found
    finally:
        sys.argv = arguments
        torch.set_rng_state(state)
