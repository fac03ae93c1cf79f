"""Read-only measurements of a model: the effect of an update on its activations, and how these are spread.

No measurement changes its subject. Gradients and steps are taken on copies; the model, its buffers, its gradients,
the optimizer and the random generators stay as they are.
"""

from ._divergence import divergence
from ._isometry import isometry, isometry_gap, isometry_strength, mean_field_bound
from ._recorder import IsometryRecorder, record
from ._result import Divergence, LayerDivergence
from .activations import GaussianMoments, gaussian_moments, hermite_coefficients

__all__ = [
    "Divergence",
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
