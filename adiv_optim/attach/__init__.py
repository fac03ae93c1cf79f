"""Corrections on a model's layers: put on, taken off, and listed."""

from ._attach import attach, correction_coverage, coverage, detach, extend
from .coverage import Coverage
from .layers import CorrectedLinear, CorrectedTransposed, register

__all__ = [
    "CorrectedLinear", "CorrectedTransposed", "Coverage", "attach", "correction_coverage", "coverage", "detach",
    "extend", "register",
]  # fmt: skip
