"""The scale and shift of channels that normalisers end with, as a layer of its own."""

import math
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor, nn


class ChannelScale(nn.Module):
    r"""Multiply each channel by a number and add another: :math:`y = \gamma \odot x + \beta`.

    The parameterised half of BatchNorm, LayerNorm and RMSNorm (Bird 2025, appendix A, Eq. 38), whose other half
    torch's normalisers compute without affine parameters, and `L2Norm` always: any of these followed by this layer is a
    normaliser with parameters, and either half can be left out.

    Args:
        normalized_shape: the number of channels, or several numbers as for nn.LayerNorm.
        dim: the dimension of the channels, the last of several: -1 as for nn.LayerNorm, or 1 as for nn.BatchNorm2d.
        elementwise_affine: have γ, the parameter `weight`, at first 1. Without it the layer is the identity.
        bias: have β beside γ, the parameter `bias`, at first 0.
        device, dtype: of the parameters.

    Shape:
        Input and output alike, `normalized_shape` at `dim`.

    Raises:
        ValueError: a size that is not positive; in the forward pass, an input with other channels.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> layer_norm = nn.Sequential(nn.LayerNorm(3, elementwise_affine=False), ChannelScale(3))
        >>> x = torch.randn(2, 3)
        >>> torch.allclose(layer_norm(x), nn.LayerNorm(3)(x))
        True
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        dim: int = -1,
        elementwise_affine: bool = True,
        bias: bool = True,
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
        for name, exists in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            parameter = nn.Parameter(torch.empty(sizes, device=device, dtype=dtype)) if exists else None
            self.register_parameter(name, parameter)
        self._initial = {"weight": 1.0, "bias": 0.0}
        self.reset_parameters()

    @property
    def features(self) -> int:
        """How many numbers a row has: the papers' d."""
        return math.prod(self.normalized_shape)

    def reset_parameters(self) -> None:
        """Give the parameters their initial values."""
        for name, value in self._initial.items():
            if (parameter := self._parameters[name]) is not None:
                nn.init.constant_(parameter, value)

    def forward(self, input: Tensor) -> Tensor:
        self._check_shape(input)
        return self._affine(input)

    def _affine(self, input: Tensor) -> Tensor:
        if self.weight is not None:
            input = self._broadcast(self.weight, input) * input
        if self.bias is not None:
            input = input + self._broadcast(self.bias, input)
        return input

    def _check_shape(self, input: Tensor) -> None:
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

    def extra_repr(self) -> str:
        affine, bias = self.weight is not None, self.bias is not None
        return f"{self.normalized_shape}, dim={self.dim}, elementwise_affine={affine}, bias={bias}"
