"""Optimizer wrappers, gradient corrections, Gauss–Newton, structural layers and diagnostics for PyTorch."""

import importlib
from typing import Any

from . import diagnostics, functional, gauge, jacobian
from .attach import attach, coverage, detach
from .corrections import BatchIdeal, Correction, Disproportional, Proportional
from .gauge.unit_consistent import UnitConsistent
from .jacobian import GaussNewton
from .optim import ChainedOptimizer, GradientOnly, InputScaled, Preconditioned, Whitened
from .rows.models import Coverage

__version__ = "0.2.0"

__all__ = [
    "BatchIdeal",
    "ChainedOptimizer",
    "Correction",
    "Coverage",
    "Disproportional",
    "GaussNewton",
    "GradientOnly",
    "InputScaled",
    "Preconditioned",
    "Proportional",
    "UnitConsistent",
    "Whitened",
    "attach",
    "coverage",
    "detach",
    "diagnostics",
    "functional",
    "gauge",
    "jacobian",
]


def __getattr__(name: str) -> Any:
    # The library must not import its layers: they load at first access.
    if name == "layers":
        return importlib.import_module(".layers", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "layers"])
