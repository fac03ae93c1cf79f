"""torch's linear and convolution with their parameter gradients rewritten by a `Correction`.

The forward is torch's, bit for bit, and so is the gradient of the input. Only the gradients of weight
and bias follow the correction, by contractions of rescaled rows or a solution for all of them: no per-sample gradient
is built.
"""

from .convolutions import conv1d, conv2d, conv3d
from .linears import linear
from .patches import box_sum, patch_squared_norm
from .shared import squared_norm

__all__ = ["box_sum", "conv1d", "conv2d", "conv3d", "linear", "patch_squared_norm", "squared_norm"]
