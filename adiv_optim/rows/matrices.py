"""The rows that a layer's weight multiplies, read off its input; and the weight as the matrix that multiplies them."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.conv import _ConvNd

from .._torch import functorch
from ..functional import convolutions
from ..functional.patches import Geometry, Patches


def conv_args(layer: Any, input: Tensor) -> tuple[Tensor, convolutions.ConvArgs]:
    """Return a convolution's input, padded if its padding is not of zeros, and its other arguments."""
    padding = layer.padding
    if layer.padding_mode != "zeros":
        input, padding = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0
    return input, (layer.stride, padding, layer.dilation, layer.groups)


def patches_of(layer: Any, input: Tensor) -> Patches:
    """Return the rows that a layer reads.

    A layer of any class may have a method `input_rows(input)`, which returns what its weight multiplies,
    (…, in_features).
    """
    if hasattr(layer, "input_rows"):
        input = layer.input_rows(input)
    if not isinstance(layer, _ConvNd):
        return Patches(row_matrix(input), (), Geometry((), (), (), 1))
    input, args = conv_args(layer, input)
    return convolutions.conv_patches(type(layer).__name__, input, layer.kernel_size, args)


def row_matrix(tensor: Tensor) -> Tensor:
    """Return a linear layer's rows as a matrix, whatever dimensions and layout the tensor has."""
    if tensor.is_nested:
        return torch.cat([row_matrix(part) for part in tensor.unbind()])
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])  # not -1: rows may have no entries


def unwrapped_input(name: str, module: nn.Module, input: Tensor) -> Tensor:
    """Return a layer's input without the transforms of torch.func and forward-mode AD that wrap it.

    Call it within `outside_transforms`, and all that uses the result.

    Raises:
        RuntimeError: vmap maps over the weight, or over the input of a layer with `input_rows`.
    """
    weight: Any = module.weight
    is_mapped = functorch.is_batchedtensor(weight)
    if not is_mapped and not functorch.is_functorch_wrapped_tensor(input):
        # The tensor itself: layers that read it too are told by it. A dual tensor leaves its tangent behind.
        return input if forward_ad.unpack_dual(input).tangent is None else input.detach()
    mapped_dims: list[int] = []  # the dimension of each level of vmap, in the tensor without the levels around it
    while functorch.is_functorch_wrapped_tensor(input):
        if functorch.is_batchedtensor(input):
            mapped_dims.append(functorch.maybe_get_bdim(input))
        input = functorch.get_unwrapped(input)
    if is_mapped or (mapped_dims and hasattr(module, "input_rows")):
        raise RuntimeError(
            f"{name}: vmap maps over {'this weight' if is_mapped else 'the argument of input_rows'}, so that the rows "
            "of its layer cannot be told; detach() the optimizer first, or call the model without vmap."
        )
    dims = list(range(input.dim()))
    input = input.permute(*[dims.pop(dim) for dim in reversed(mapped_dims)], *dims)
    if mapped_dims and isinstance(module, _ConvNd):  # the mapped dimensions become samples
        input = input.flatten(0, -2 - len(module.kernel_size))
    return input.detach()


def as_matrices(part: Tensor, transposed: bool, groups: int, count: int = 1) -> Tensor:
    """Return a weight as (count × groups, outputs, features), a bias as (count × groups, outputs, 1).

    With a `count` above 1 dimension 0 stacks that many parameters. A view, where the memory allows one. For
    `transposed` and `groups` see `Layout`.
    """
    shape = part.shape[count > 1 :]
    if len(shape) == 2 and transposed:
        return part.mT if count > 1 else part.mT[None]
    return part.reshape(count * groups, shape[0] // groups, shape[1:].numel())


def from_matrices(matrices: Tensor, transposed: bool, shape: tuple[int, ...], count: int = 1) -> Tensor:
    """Return each part in its shape again: the inverse of `as_matrices`; the dtype stays."""
    if len(shape) == 2 and transposed:
        matrices = matrices.mT
    return matrices.reshape((count, *shape) if count > 1 else shape)
