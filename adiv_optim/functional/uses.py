"""Reading off a loss's graph which parameters it depends on other than through a corrected layer."""

from typing import Any

from torch import Tensor

from .convolutions import _Conv
from .linears import _Linear

_CORRECTED = (_Linear, _Conv)

#: Torch's names for the nodes of compiled functions, convolutions under vmap, and reentrant checkpoints.
_UNREADABLE = ("CompiledFunction", "Vmapped_Conv", "CheckpointFunction")


def plain_uses(loss: Tensor) -> set[int]:
    """The ids of the parameters of which some part of the gradient is plain, whatever corrected layers add to it.

    A corrected layer rewrites the gradients of its weight and bias, and nothing else: where a path through the graph
    leads to a parameter without entering a corrected layer's weight or bias, plain gradient flows along it.
    """
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        raise TypeError(
            f"coverage: loss is {loss!r}, which has no graph; pass the tensor that backward() is called on, computed "
            "by the model with gradients enabled."
        )
    reached: set[int] = set()
    nodes: list[Any] = [loss.grad_fn]
    seen = set(nodes)  # keeps the nodes alive: torch makes the Python side of a node when it is asked for
    while nodes:
        node = nodes.pop()
        if type(node).__name__.startswith(_UNREADABLE):
            raise ValueError(
                f"coverage: the graph of the loss has a {type(node).__name__}, of torch.compile, vmap or a reentrant "
                "checkpoint, which cannot be read; pass a loss that the model computes without them."
            )
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        # The first input of a corrected layer is its own input; the others are its weight and bias.
        count = 1 if getattr(node, "_forward_cls", None) in _CORRECTED else None
        below = {function for function, _ in node.next_functions[:count] if function is not None} - seen
        seen |= below
        nodes += below
    return reached
