"""What layers with parameters per channel share: a size, a dimension, γ and β."""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import TypedDict

import torch
from torch import Tensor, nn


class ChannelOptions(TypedDict, total=False):
    """What layers with parameters per channel take by name; see `ChannelScale`."""

    dim: int
    elementwise_affine: bool
    bias: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


def empty(shape: tuple[int, ...], options: ChannelOptions) -> nn.Parameter:
    """Return a parameter without values yet, of the options' device and dtype."""
    return nn.Parameter(torch.empty(shape, device=options.get("device"), dtype=options.get("dtype")))


class Channelwise(nn.Module):
    """Base of layers whose parameters belong to the channels of one dimension; `ChannelScale` says what it takes."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        dim: int = -1,
        elementwise_affine: bool = True,
        bias: bool = True,
        affine_shape: tuple[int, ...] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = tuple(normalized_shape) if isinstance(normalized_shape, Sequence) else (normalized_shape,)
        if not sizes or not all(isinstance(size, Integral) and size >= 1 for size in sizes):
            raise ValueError(
                f"{type(self).__name__}: normalized_shape is {normalized_shape}; give the number of channels, "
                "a positive integer, or several of them."
            )
        self.normalized_shape, self.dim = sizes, dim
        shape = sizes if affine_shape is None else affine_shape
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            self.register_parameter(name, empty(shape, {"device": device, "dtype": dtype}) if wanted else None)

    @property
    def features(self) -> int:
        """How many numbers a row has: the papers' d."""
        return math.prod(self.normalized_shape)

    def reset_parameters(self) -> None:
        """Give the parameters their initial values."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _check(self, input: Tensor) -> None:
        """Raise a ValueError unless the input has these channels at their dimension."""
        if -input.dim() <= self.dim < input.dim():
            end = self.dim % input.dim() + 1
            if input.shape[end - len(self.normalized_shape) : end] == self.normalized_shape:
                return
        raise ValueError(
            f"{type(self).__name__}: the input has shape {tuple(input.shape)}, but its size at dimension {self.dim} "
            f"should be {', '.join(map(str, self.normalized_shape))}; set normalized_shape to the number of channels, "
            "and dim to where they are."
        )

    def _broadcast(self, parameter: Tensor, input: Tensor) -> Tensor:
        """View a parameter so that its last dimension meets the input's `dim`."""
        behind = input.dim() - 1 - self.dim if self.dim >= 0 else -1 - self.dim
        return parameter.view(*parameter.shape, *(1,) * behind)

    def _affine(self, input: Tensor) -> Tensor:
        """Return γ ⊙ x + β."""
        if self.weight is not None:
            input = self._broadcast(self.weight, input) * input
        if self.bias is not None:
            input = input + self._broadcast(self.bias, input)
        return input

    def extra_repr(self) -> str:
        affine, bias = self.weight is not None, self.bias is not None
        return f"{self.normalized_shape}, dim={self.dim}, elementwise_affine={affine}, bias={bias}"
