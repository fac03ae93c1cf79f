"""From a layer and its input to the rows that its weight multiplies, and from the weight to a matrix and back."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, dtype, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from ..attach.layers import CORRECTED, PLAIN, corrected_types, is_transposed, plain_type
from ..functional.patches import patch_squared_norm, unfold

#: Numbers of unfolded patches that are there at once.
CHUNK = 2**21


def features_of(module: nn.Module) -> int:
    """How many features a row of the layer has."""
    weight = module.get_parameter("weight")
    return len(weight) if is_transposed(module) else weight[0].numel()


def why_not_rows(name: str, parameter: nn.Parameter, modules: list[nn.Module]) -> str:
    """Say why a parameter is not a weight whose rows are known, or "".

    Args:
        name: its path.
        parameter: the parameter.
        modules: all modules that own it.
    """
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


def rows_of(module: Any, input: Tensor, dtype: dtype) -> Iterator[Tensor]:
    """What the layer's weight multiplies, as (groups, rows, features).

    Of a convolution these are patches, those of a few samples at a time. A subclass of nn.Linear that multiplies
    something else than its input says so by a method `input_rows(input)`, which returns (…, in_features).
    """
    if hasattr(module, "input_rows"):
        input = module.input_rows(input)
    if not isinstance(module, _ConvNd):
        yield input.reshape(1, -1, input.shape[-1]).to(dtype)
        return
    batch, unpadded = _padded(module, input), [0] * len(module.kernel_size)
    step = max(1, CHUNK // max(1, math.prod(module.kernel_size) * batch[:1].numel()))
    for part in batch.split(step):
        yield unfold(part.to(dtype), module.kernel_size, module.stride, unpadded, module.dilation, module.groups)


def squares_of(module: Any, input: Tensor, dtype: dtype) -> tuple[Tensor, int]:
    """The sum of squares of the rows of `rows_of`, a number for each group, and how many rows a group has."""
    if hasattr(module, "input_rows"):
        input = module.input_rows(input)
    if not isinstance(module, _ConvNd):
        return torch.linalg.vector_norm(input, dtype=dtype).square()[None], input[..., 0].numel()
    unpadded = [0] * len(module.kernel_size)
    norms = patch_squared_norm(
        _padded(module, input).to(dtype), module.kernel_size, module.stride, unpadded, module.dilation, module.groups
    )
    return norms.transpose(0, 1).flatten(1).sum(1), norms[:, 0].numel()


def _padded(module: Any, input: Tensor) -> Tensor:
    """The input of a convolution as a batch, with its padding."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    batch = input if input.dim() == len(module.kernel_size) + 2 else input.unsqueeze(0)
    return F.pad(batch, module._reversed_padding_repeated_twice, mode=mode)


def as_matrix(module: Any, part: Tensor, dtype: dtype) -> Tensor:
    """A weight as (outputs, features), a bias as (outputs, 1); groups, where there are several, in front."""
    part = part.detach()
    if part.dim() > 1 and is_transposed(module):
        return part.mT.to(dtype)
    groups = getattr(module, "groups", 1)
    columns = part[0].numel() if part.dim() > 1 else 1
    return part.reshape(*((groups,) if groups > 1 else ()), -1, columns).to(dtype)


def from_matrix(module: Any, matrix: Tensor, parameter: Tensor) -> Tensor:
    """What `as_matrix` made a matrix of, in the parameter's shape and dtype."""
    if parameter.dim() > 1 and is_transposed(module):
        matrix = matrix.mT
    return matrix.reshape(parameter.shape).to(parameter.dtype)
