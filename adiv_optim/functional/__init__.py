"""torch's linear and convolution with their parameter gradients rewritten by a `Correction`.

The forward is torch's, bit for bit, and so is the gradient of the input. Only the gradients of weight
and bias follow the correction, in one contraction of rescaled rows: no per-sample gradient is built.
`uc_linear` and `uc_backpropagation` are of another kind: they replace the gradient of the input.
"""

from ._conv import conv1d, conv2d, conv3d
from ._linear import linear
from ._patches import box_sum, patch_squared_norm
from ._shared import squared_norm
from ._unit_consistent import UCBackpropagation, uc_backpropagation, uc_linear

__all__ = [
    "UCBackpropagation",
    "box_sum",
    "conv1d",
    "conv2d",
    "conv3d",
    "linear",
    "patch_squared_norm",
    "squared_norm",
    "uc_backpropagation",
    "uc_linear",
]
