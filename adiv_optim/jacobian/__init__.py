"""Corrections and ideal steps by explicit Jacobians, for any module torch.func can differentiate.

`corrected_gradients` uses no closed form. A layer's Jacobians J = ∂z/∂θ come from vmap over jacrev, its divergence
factors are tr(JJᵀ)/m, and a corrected gradient is the scaled contraction of Jacobians with output gradients. For
nn.Linear and nn.Conv1d/2d/3d it agrees with `attach` to rounding, at many times the cost and memory: use it to train
layers that have no closed form, and to check those that have. `ideal_update` computes the parameter step that moves a
module's output as asked.

`GaussNewton` takes the ideal step of a whole network, from the Jacobian of its residuals; residuals of differential
equations are written with `laplacian` and `derivatives`.
"""

from .gauss_newton import GaussNewton
from .gradients import backward, corrected_gradients, layer_jacobians
from .ideal import IdealUpdate, ideal_update
from .input_derivatives import Derivatives, derivatives, laplacian
from .modules import PLAIN_BY_DEFAULT

__all__ = [
    "PLAIN_BY_DEFAULT", "Derivatives", "GaussNewton", "IdealUpdate", "backward", "corrected_gradients", "derivatives",
    "ideal_update", "laplacian", "layer_jacobians",
]  # fmt: skip
