"""Which weights multiply rows that are known, and from such a weight to a matrix and back."""

from dataclasses import dataclass

import torch
from torch import Tensor, dtype, nn
from torch.nn.utils import parametrize

from .._linalg.shards import local
from ..attach.layers import is_transposed, plain_type, why_unknown_rows

#: Why the weight of a layer whose rows are known takes plain steps until it trains.
FROZEN = "frozen"


def features_of(module: nn.Module) -> int:
    """How many features a row of the layer has, as far as this process holds them."""
    weight = local(module.get_parameter("weight"))
    return len(weight) if is_transposed(module) else weight.shape[1:].numel()


def why_not_rows(name: str, parameter: nn.Parameter, modules: list[nn.Module]) -> str:
    """Say why a parameter is not a weight whose rows are known, or ""."""
    for module in modules:
        why, declares_rows = why_unknown_rows(module), callable(getattr(module, "input_rows", None))
        if plain_type(module) is parametrize.ParametrizationList:
            return "parametrized"
        if why and ("forward" in module.__dict__ or not declares_rows):
            return why
        if parametrize.is_parametrized(module):
            return "parametrized"
        if module._parameters.get("weight") is not parameter and parameter.requires_grad:
            bias = name.rpartition(".")[2] == "bias"
            return "a bias without its weight" if bias else "not a weight that the layer uses as it is"
    if not parameter.requires_grad:
        return FROZEN
    return "complex" if parameter.is_complex() else ""


@dataclass(frozen=True)
class Layout:
    """How the parameters of a layer lie as matrices with a row for each output.

    Args:
        transposed: whether the weight has a column for each output.
        groups: how many matrices there are, one above the other.
    """

    transposed: bool
    groups: int

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        """Return the layout of a layer's weight and bias."""
        return cls(is_transposed(module), getattr(module, "groups", 1))

    def matrix(self, part: Tensor, dtype: dtype) -> Tensor:
        """A weight as (outputs, features), a bias as (outputs, 1); groups, where there are several, in front.

        Of a sharded one the rows that this process holds.
        """
        part = local(part).detach()
        if part.dim() > 1 and self.transposed:
            part = part.mT
        elif self.groups > 1:
            part = part.reshape(self.groups, len(part) // self.groups, part.shape[1:].numel())
        elif part.dim() != 2:
            part = part.flatten(1) if part.dim() > 1 else part[:, None]
        return part if part.dtype == dtype else part.to(dtype)

    def part(self, matrix: Tensor, parameter: Tensor) -> Tensor:
        """The inverse of `matrix`, in the parameter's shape, or that of its rows held here; the dtype stays."""
        if parameter.dim() > 1 and self.transposed:
            matrix = matrix.mT
        shape = local(parameter).shape
        return matrix if matrix.shape == shape else matrix.reshape(shape)

    def gradient(self, matrix: Tensor, old: Tensor) -> Tensor:
        """A matrix as the gradient of a parameter, laid out as the old one: fused optimizers take that for granted."""
        new = self.part(matrix, old)
        if new.dtype == old.dtype and local(old) is old and new.stride() == old.stride():
            return new
        made = torch.empty_like(old)
        local(made).copy_(new)
        return made
