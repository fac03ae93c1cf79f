"""The parameters of a map while the optimizer steps on them."""

from collections.abc import Mapping
from typing import Any

import torch

from .._linalg.shards import local
from .chart import Known, Map


class Held:
    """A map's parameters as they were before the step; putting them back allocates nothing.

    Parameters that no one reads are 0 while the optimizer steps.
    """

    def __init__(self, map_: Map, kept: Mapping[int, float], watched: bool) -> None:
        self.map, self.moving = map_, map_.parameters if map_.moves_weights else ()
        factors = [kept[id(p)] for p in map_.parameters if id(p) in kept]
        if len(factors) == len(map_.parameters):
            self.known = Known(factors, from_zero=not watched)
        else:
            self.known = Known([1.0] * len(map_.parameters))
        self.gradients = [p.grad for p in map_.parameters]
        self.weights = [p.detach().clone(memory_format=torch.preserve_format) for p in self.moving]

    def enter(self) -> None:
        """Write the parameters and their gradients in the coordinates of the step."""
        if self.known.from_zero:
            for parameter in self.moving:
                local(parameter).fill_(-0.0)  # w + (-0) is w for every w; w + 0 would make +0 of -0
        for parameter in self.map.parameters:
            # Tensor parallelism may leave a gradient as parts that are yet to be added up.
            gradient: Any = parameter.grad
            wanted = getattr(parameter, "placements", None)
            if gradient is not None and getattr(gradient, "placements", None) != wanted:
                parameter.grad = gradient.redistribute(placements=wanted)
        self.map.enter(self.weights, self.known)

    def stepped(self) -> None:
        """Free what the optimizer alone has read."""
        for parameter, gradient in zip(self.map.parameters, self.gradients, strict=True):
            if parameter.grad is not None:  # else the optimizer has freed it
                parameter.grad = gradient

    def leave(self) -> None:
        """Write the step, mapped back."""
        self.map.leave(self.weights, self.known)

    def restore(self) -> None:
        """Give parameters and gradients their values of before the step."""
        for parameter, value in zip(self.moving, self.weights, strict=True):
            parameter.copy_(value)
        for parameter, gradient in zip(self.map.parameters, self.gradients, strict=True):
            parameter.grad = gradient
