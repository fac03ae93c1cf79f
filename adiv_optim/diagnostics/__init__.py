"""Read-only measurements of a model: the effect of an update on its activations, and how these are spread.

Nothing here changes what it looks at. Gradients and steps are taken on copies; the model, its buffers, its
gradients, the optimizer and the random generators are afterwards what they were before.
"""

from ..activations import GaussianMoments, gaussian_moments, hermite_coefficients
from ._divergence import divergence
from ._recorder import DivergenceRecorder
from ._result import Divergence, LayerDivergence
from .isometry import IsometryRecorder, isometry, isometry_gap, isometry_strength, mean_field_bound, record

__all__ = [
    "Divergence",
    "DivergenceRecorder",
    "GaussianMoments",
    "IsometryRecorder",
    "LayerDivergence",
    "divergence",
    "gaussian_moments",
    "hermite_coefficients",
    "isometry",
    "isometry_gap",
    "isometry_strength",
    "mean_field_bound",
    "record",
]
