"""The parameters of a map while the optimizer steps on them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._linalg.shards import local
from .chart import Known, Map
from .room import Room


class Held:
    """A map's parameters as they were before the step; putting them back allocates nothing.

    Parameters that no one reads are 0 while the optimizer steps, in other memory, which saves copies of them. What
    reads them may have views of their memory, so that they stay there; so do sharded ones and others that wrap tensors,
    whose memory cannot be exchanged from outside.
    """

    def __init__(self, map_: Map, kept: Mapping[int, float], watched: bool, room: Room) -> None:
        self.map, self.moving = map_, map_.parameters if map_.moves_weights else ()
        factors = [kept[id(p)] for p in map_.parameters if id(p) in kept]
        if len(factors) == len(map_.parameters):
            plain = not any(is_traceable_wrapper_subclass(p) for p in self.moving)
            self.known = Known(factors, from_zero=not watched, aside=plain and not watched)
        else:
            self.known = Known([1.0] * len(map_.parameters))
        self.gradients = [p.grad for p in map_.parameters]
        # An unknown optimizer may keep the gradients that it is given.
        self.like = room.like if self.known.from_zero else torch.empty_like
        self.weights = [p.detach() for p in self.moving]
        self.others = [room.like(weight) for weight in self.weights]
        if not self.known.aside:
            self.weights = [other.copy_(weight) for other, weight in zip(self.others, self.weights, strict=True)]

    def enter(self) -> None:
        """Write the parameters and their gradients in the coordinates of the step."""
        if self.known.aside:
            self._put(self.others)
        if self.known.from_zero:
            for parameter in self.moving:
                local(parameter).fill_(-0.0)  # w + (-0) is w for every w; w + 0 would make +0 of -0
        for parameter in self.map.parameters:
            # Tensor parallelism may leave a gradient as parts that are yet to be added up.
            gradient: Any = parameter.grad
            wanted = getattr(parameter, "placements", None)
            if gradient is not None and getattr(gradient, "placements", None) != wanted:
                parameter.grad = gradient.redistribute(placements=wanted)
        self.map.enter(self.weights, self.known, self.like)

    def stepped(self) -> None:
        """Free what the optimizer alone has read."""
        for parameter, gradient in zip(self.map.parameters, self.gradients, strict=True):
            if parameter.grad is not None:  # else the optimizer has freed it
                parameter.grad = gradient

    def leave(self) -> None:
        """Write the step, mapped back."""
        self.map.leave(self.weights, self.known)
        if self.known.aside:
            self._put(self.weights)

    def _put(self, values: Sequence[Tensor]) -> None:
        """Let the parameters be these, by changing their memory or what is in it."""
        for parameter, value in zip(self.moving, values, strict=True):
            if self.known.aside:
                parameter.data = value
            else:
                parameter.copy_(value)

    def restore(self) -> None:
        """Give parameters and gradients their values of before the step."""
        self._put(self.weights)
        for parameter, gradient in zip(self.map.parameters, self.gradients, strict=True):
            parameter.grad = gradient
