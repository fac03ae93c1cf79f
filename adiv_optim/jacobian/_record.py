"""Watching a model's forward: which corrected layer read what, and what it returned."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class Call(NamedTuple):
    """One call of a corrected layer."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]
    versions: tuple[int, ...]
    output: Tensor
    path: str


@contextmanager
def recorded(layers: dict[str, nn.Module]) -> Iterator[list[Call]]:
    """Record every call of the layers, whose own parameters are constants meanwhile.

    Their part in the gradient is left to the Jacobians; what autograd then finds for a parameter is the
    part of the modules that are not corrected, should it be shared with one.
    """
    calls: list[Call] = []
    trained = {layer: [p for p in layer.parameters() if p.requires_grad] for layer in layers.values()}
    paths = {layer: path for path, layer in layers.items()}

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs or not all(isinstance(arg, Tensor) for arg in args):
            raise ValueError(
                f"layer {paths[layer]!r} ({type(layer).__name__}) was called with keyword or non-tensor "
                "arguments, which have no per-sample Jacobian; pass tensors by position or leave it out of `layers`."
            )
        for parameter in trained[layer]:
            parameter.requires_grad_(False)

    def after(layer: nn.Module, args: tuple[Tensor, ...], output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise ValueError(
                f"layer {paths[layer]!r} ({type(layer).__name__}) returned {type(output).__name__}; only a layer that "
                "returns one tensor has rows to correct: leave it out of `layers`."
            )
        for parameter in trained[layer]:
            parameter.requires_grad_(True)
        output = output if output.requires_grad else output.detach().requires_grad_()
        calls.append(Call(layer, args, tuple(arg._version for arg in args), output, paths[layer]))
        # A clone, so that an in-place activation behind the layer leaves the recorded output alone.
        return output.clone()

    handles = []
    try:
        for layer in layers.values():
            handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(layer.register_forward_hook(after))
        yield calls
    finally:
        for handle in handles:
            handle.remove()
        for parameters in trained.values():
            for parameter in parameters:
                parameter.requires_grad_(True)
