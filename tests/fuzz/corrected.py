"""The corrections by hand, row by row."""

import math

import torch
from torch import Tensor, nn

from tests.fuzz.by_hand import Method, from_matrices, mean, outer, weights
from tests.fuzz.networks import LAYERS

#: The least divergence factor.
EPS = 1e-12


class Corrected(Method):
    """Rows whose pull on the layer's parameters is rescaled."""

    def enter(self) -> None:
        plain: dict[nn.Parameter, Tensor] = {}
        corrected: dict[nn.Parameter, Tensor] = {}
        for call in self.calls:
            layer, trained = call.layer, {n: p for n, p in call.layer.named_parameters() if p.requires_grad}
            sums = {"weight": outer(call, call.gradients), "bias": torch.cat([g.sum(0) for g in call.gradients])}
            parts = [self.of_group(x, g, list(trained)) for x, g in zip(call.rows, call.gradients, strict=True)]
            for name, parameter in trained.items():
                found = [part[name] for part in parts]
                new = from_matrices(layer, found) if name == "weight" else torch.cat(found)
                plain[parameter] = plain.get(parameter, 0) + sums[name]
                corrected[parameter] = corrected.get(parameter, 0) + new
        elsewhere = {p for p, owners in weights(self.model).items() if not all(isinstance(m, LAYERS) for m in owners)}
        for parameter, new in corrected.items():
            if parameter.grad is not None:
                parameter.grad = new + (parameter.grad - plain[parameter] if parameter in elsewhere else 0)
        self.left = self.gradients()

    def of_group(self, x: Tensor, g: Tensor, trained: list[str]) -> dict[str, Tensor]:
        """The gradients of one group of a call: (outputs, features) and (outputs,)."""
        raise NotImplementedError


def squared(x: Tensor) -> float:
    return float(sum(value * value for value in x.tolist()))


class Proportional(Corrected):
    """s_k = 1 / (|x_k|² + 1), counting what is trained."""

    def of_group(self, x: Tensor, g: Tensor, trained: list[str]) -> dict[str, Tensor]:
        weight, bias = torch.zeros(g.shape[1], x.shape[1]), torch.zeros(g.shape[1])
        for row, pull in zip(x, g, strict=True):
            total = squared(row) * ("weight" in trained) + ("bias" in trained)
            if total:
                weight += torch.outer(pull, row) / max(total, EPS)
                bias += pull / max(total, EPS)
        return {"weight": weight, "bias": bias}


class Disproportional(Corrected):
    """Each of the trained parameters gives an equal share of the ideal step."""

    def of_group(self, x: Tensor, g: Tensor, trained: list[str]) -> dict[str, Tensor]:
        weight, bias = torch.zeros(g.shape[1], x.shape[1]), torch.zeros(g.shape[1])
        for row, pull in zip(x, g, strict=True):
            if norm := squared(row):
                weight += torch.outer(pull, row) / (len(trained) * max(norm, EPS))
            bias += pull / len(trained)
        return {"weight": weight, "bias": bias}


class BatchIdeal(Corrected):
    """The step θ of least |X~θ − G|² + λ|θ|², by stacking √λ below X~."""

    def of_group(self, x: Tensor, g: Tensor, trained: list[str]) -> dict[str, Tensor]:
        columns = [x] * ("weight" in trained) + [torch.ones(len(x), 1)] * ("bias" in trained)
        if not columns:
            return {}
        joined = torch.cat(columns, 1)
        ridge = self.settings["damping"] * mean(map(squared, joined))
        below = math.sqrt(ridge) * torch.eye(joined.shape[1])
        right = torch.cat([g, torch.zeros(len(below), g.shape[1])])
        found = torch.linalg.lstsq(torch.cat([joined, below]), right, driver="gelsd").solution
        found *= len(x) if self.settings["per_sample"] else 1
        return {"weight": found[: x.shape[1]].T, "bias": found[-1]}
