"""The corrections by explicit per-row Jacobians, for any module torch.func can differentiate.

Nothing here knows a closed form. A layer's Jacobians ∂z/∂θ come from vmap over jacrev, its divergence
factors are their traces, and a corrected gradient is the scaled contraction of Jacobians with output
gradients. For nn.Linear and nn.Conv1d/2d/3d it agrees with `attach` to rounding, at many times the cost
and memory: use it to train layers that have no closed form, and to check those that have.
"""

from ._gradients import backward, corrected_gradients
from ._ideal import IdealUpdate, ideal_update
from .modules import PLAIN_BY_DEFAULT
from .rows import layer_jacobians

__all__ = ["PLAIN_BY_DEFAULT", "IdealUpdate", "backward", "corrected_gradients", "ideal_update", "layer_jacobians"]
