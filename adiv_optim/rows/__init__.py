"""Layers whose rows are known: what their weights multiply, what stands in for them, and which are reached."""

from .coverage import Coverage
from .layers import CorrectedLinear, CorrectedTransposed, register

__all__ = ["CorrectedLinear", "CorrectedTransposed", "Coverage", "register"]
