"""Measurements of a model: how an optimizer's step moves the outputs of layers, and how isometric these are."""

from ._divergence import divergence
from ._isometry import isometry, isometry_gap, isometry_strength
from ._result import Divergence, LayerDivergence
from .activations import GaussianMoments, gaussian_moments, hermite_coefficients

__all__ = [
    "Divergence", "GaussianMoments", "LayerDivergence", "divergence", "gaussian_moments", "hermite_coefficients",
    "isometry", "isometry_gap", "isometry_strength",
]  # fmt: skip
