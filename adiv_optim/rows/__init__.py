"""Layers whose rows are known: the rows that weights multiply, corrected layers, and which parameters are reached."""

from .layers import CorrectedLinear, CorrectedTransposed, register

__all__ = ["CorrectedLinear", "CorrectedTransposed", "register"]
