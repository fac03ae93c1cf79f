"""What an update really does to the activations: read-only measurements of a model in training.

Nothing here changes what it looks at. Gradients and steps are taken on copies; the model, its buffers, its
gradients, the optimizer and the random generators are afterwards what they were before.
"""

from ._divergence import divergence
from ._recorder import DivergenceRecorder
from ._result import Divergence, LayerDivergence

__all__ = ["Divergence", "DivergenceRecorder", "LayerDivergence", "divergence"]
