"""The parameterised scaling that normalisers end with, by itself."""

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from .channelwise import ChannelOptions, Channelwise


class ChannelScale(Channelwise):
    r"""Multiply each channel by a number and add another: :math:`y = \gamma \odot x + \beta`.

    The parameterised half of BatchNorm, LayerNorm and RMSNorm (Bird 2025, appendix A, Eq. 38), whose other half
    torch's normalisers compute with `affine=False`, and `L2Norm` always: any of these followed by this layer is a
    normaliser with parameters, and either half can be left out.

    Args:
        normalized_shape: the number of channels, or several numbers as for nn.LayerNorm.
        per_channel: one γ and β per channel; if not, one of each for all channels.
        channels: `dim`, the dimension of the channels, or the last of several: -1 as for nn.LayerNorm, the default, or
            1 as for nn.BatchNorm2d; `elementwise_affine`, whether there are γ and β, without which the layer is the
            identity; `bias`, whether there is β beside γ; `device` and `dtype` of the parameters. γ is `weight`, at
            first 1, and β is `bias`, at first 0.

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

    def __init__(
        self, normalized_shape: int | Sequence[int], *, per_channel: bool = True, **channels: Unpack[ChannelOptions]
    ) -> None:
        super().__init__(normalized_shape, affine_shape=None if per_channel else (1,), **channels)
        self.per_channel = per_channel
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """Return γ ⊙ x + β."""
        self._check(input)
        return self._affine(input)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, per_channel={self.per_channel}"
