"""Optimizer wrappers, gradient corrections, Gauss–Newton, structural layers and diagnostics for PyTorch."""

from . import diagnostics, functional, gauge, jacobian, layers
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
    "layers",
]
