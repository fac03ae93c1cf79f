"""An optimizer whose steps land on a value."""

import torch


class Proximal(torch.optim.Optimizer):
    """Sets weights, as pruning, clamping and proximal steps do."""

    def __init__(self, parameters, value: float) -> None:
        super().__init__(parameters, {"value": value})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.detach().copy_(torch.where(p.abs() < 1.0, torch.full_like(p, self.param_groups[0]["value"]), p))
