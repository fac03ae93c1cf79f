"""Activations under standard normal inputs: Gaussian moments and Hermite series."""

from .moments import GaussianMoments, gaussian_moments, hermite_coefficients
from .quadrature import Activation

__all__ = ["Activation", "GaussianMoments", "gaussian_moments", "hermite_coefficients"]
