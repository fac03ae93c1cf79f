"""Corrections on a model's layers: put on, taken off, and listed."""

from ._attach import attach, correction_coverage, coverage, detach, extend
from .coverage import Coverage

__all__ = ["Coverage", "attach", "correction_coverage", "coverage", "detach", "extend"]
