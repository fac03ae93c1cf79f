"""torch's linear and convolution, with parameter gradients rewritten by a `Correction` and never built row by row."""

from .convolutions import conv1d, conv2d, conv3d
from .linears import linear
from .shared import box_sum, patch_squared_norm, squared_norm

__all__ = ["box_sum", "conv1d", "conv2d", "conv3d", "linear", "patch_squared_norm", "squared_norm"]
