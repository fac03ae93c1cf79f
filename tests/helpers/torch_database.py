"""The databases PyTorch tests its own optimizers and modules with; importing them leaves no trace."""

import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
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
    pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
    with _undisturbed():
        from torch.testing._internal.common_optimizers import optim_db
    return {info.name: info for info in optim_db}


@cache
def modules() -> dict[str, Any]:
    """Name → torch.testing._internal.common_modules.ModuleInfo."""
    pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
    with _undisturbed():
        from torch.testing._internal.common_modules import module_db
    return {info.name.removeprefix("nn."): info for info in module_db}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Undo that the import reads the command line, warns, seeds torch, and forbids to set flags of torch.backends."""
    state, arguments = torch.get_rng_state(), sys.argv
    sys.argv = sys.argv[:1]
    try:
        with warnings.catch_warnings(), torch.backends.__allow_nonbracketed_mutation():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.argv = arguments
        torch.set_rng_state(state)
