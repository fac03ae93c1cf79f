"""Layers whose rows, the input vectors that a weight multiplies, are known; their corrected forms; and coverage."""

from .layers import CorrectedAffine, CorrectedLinear, CorrectedTransposed, register

__all__ = ["CorrectedAffine", "CorrectedLinear", "CorrectedTransposed", "register"]
