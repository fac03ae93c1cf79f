"""Gradient corrections, unit-consistent steps and diagnostics for PyTorch optimizers."""

from . import attention, diagnostics, functional, gauge, jacobian
from .attach import Coverage, attach, coverage, detach
from .corrections import BatchIdeal, Correction, Disproportional, Proportional
from .optim import GradientOnly, UnitConsistent, Whitened
from .running import precondition

__version__ = "0.1.0"

__all__ = [
    "BatchIdeal",
    "Correction",
    "Coverage",
    "Disproportional",
    "GradientOnly",
    "Proportional",
    "UnitConsistent",
    "Whitened",
    "attach",
    "attention",
    "coverage",
    "detach",
    "diagnostics",
    "functional",
    "gauge",
    "jacobian",
    "precondition",
]
