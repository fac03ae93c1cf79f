"""Which weights multiply rows that are known, and from such a weight to a matrix and back."""

from typing import Any

from torch import Tensor, dtype, nn
from torch.nn.utils import parametrize

from .._linalg.shards import local
from ..attach.layers import CORRECTED, PLAIN, corrected_types, is_transposed, plain_type


def features_of(module: nn.Module) -> int:
    """How many features a row of the layer has, as far as this process holds them."""
    weight = local(module.get_parameter("weight"))
    return len(weight) if is_transposed(module) else weight.shape[1:].numel()


def why_not_rows(name: str, parameter: nn.Parameter, modules: list[nn.Module]) -> str:
    """Say why a parameter is not a weight whose rows are known, or ""."""
    for module in modules:
        kind = plain_type(module)
        if kind not in corrected_types() and kind not in PLAIN and not hasattr(module, "input_rows"):
            base = next((base for base in CORRECTED if issubclass(kind, base)), None)
            if base is None:
                return f"{kind.__name__} is not a layer whose rows are known"
            return f"{kind.__name__} is a subclass of {base.__name__}, whose weight may multiply something else"
        if "forward" in module.__dict__:
            return f"this {kind.__name__} has a forward of its own set on it"
        if parametrize.is_parametrized(module):
            return "parametrized"
        if module._parameters.get("weight") is not parameter:
            bias = name.rpartition(".")[2] == "bias"
            return "a bias without its weight" if bias else "not a weight that the layer uses as it is"
    if not parameter.requires_grad:
        return "frozen when the optimizer was wrapped"
    return "complex" if parameter.is_complex() else ""


def as_matrix(module: Any, part: Tensor, dtype: dtype) -> Tensor:
    """A weight as (outputs, features), a bias as (outputs, 1); groups, where there are several, in front.

    Of a sharded one the rows that this process holds.
    """
    part = local(part).detach()
    if part.dim() > 1 and is_transposed(module):
        return part.mT.to(dtype)
    groups = getattr(module, "groups", 1)
    rows = (groups, len(part) // groups) if groups > 1 else (len(part),)
    return part.reshape(*rows, part.shape[1:].numel()).to(dtype)


def from_matrix(module: Any, matrix: Tensor, parameter: Tensor) -> Tensor:
    """The inverse of `as_matrix`, in the parameter's shape and dtype, or those of its rows held here."""
    if parameter.dim() > 1 and is_transposed(module):
        matrix = matrix.mT
    return matrix.reshape(local(parameter).shape).to(parameter.dtype)
