"""The optimizer in canonical coordinates, by hand."""

from typing import Any

import torch
from torch import Tensor

from tests.fuzz import channels as by_channel
from tests.fuzz.by_hand import Method
from tests.fuzz.networks import Network
from tests.fuzz.trainings import Training


class UnitConsistent(Method):
    """Steps on W / f with the gradient G f."""

    def __init__(self, model: Network, training: Training, **settings: Any) -> None:
        super().__init__(model, training, **settings)
        self.channels = by_channel.follow(model, training.inputs[0])
        self.factors: dict[int, Tensor] = {}

    def enter(self) -> None:
        self.left = self.gradients()
        if self.steps % self.settings["every"] == 0:
            self._measure()
        self.mapped = []
        for parameter in self.model.parameters():
            if parameter.grad is None or id(parameter) not in self.factors:
                continue
            factor = self.factors[id(parameter)]
            self.mapped.append((parameter, factor))
            parameter.grad = parameter.grad * factor
            parameter /= factor

    def _measure(self) -> None:
        self.factors = by_channel.network_scales(self.channels, self.model)
        if self.settings["gauge"] == "layer":
            for parameter in self.model.parameters():
                moves = self.channels.moves.get(id(parameter))
                if moves is not None and moves.usual is not None and parameter.dim() > 1:
                    # What zeros leave open is settled in the network gauge.
                    balance = self.factors.get(id(parameter), torch.ones_like(parameter))
                    own = by_channel.layer_scales(parameter / balance, moves.groups)
                    self.factors[id(parameter)] = balance * own

    def leave(self) -> None:
        for parameter, factor in self.mapped:
            parameter *= factor
