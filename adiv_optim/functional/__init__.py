"""torch's linear and convolution, with parameter gradients rewritten by a `Correction` and never built row by row."""

from .convolutions import conv1d, conv2d, conv3d
from .linears import linear

__all__ = ["conv1d", "conv2d", "conv3d", "linear"]
