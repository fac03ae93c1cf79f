"""Corrections and ideal steps by explicit Jacobians, for any module torch.func can differentiate.

For nn.Linear and nn.Conv1d/2d/3d `corrected_gradients` agrees with `attach` to rounding, at many times the cost and
memory: use it to train layers that have no closed form, and to check those that have. Residuals of differential
equations, for `GaussNewton`, are written with `laplacian` and `derivatives`.
"""

from .gauss_newton import GaussNewton
from .gradients import backward, corrected_gradients, layer_jacobians
from .ideal import ideal_update
from .input_derivatives import Derivatives, derivatives, laplacian
from .modules import PLAIN_BY_DEFAULT

__all__ = [
    "PLAIN_BY_DEFAULT", "Derivatives", "GaussNewton", "backward", "corrected_gradients", "derivatives",
    "ideal_update", "laplacian", "layer_jacobians",
]  # fmt: skip
