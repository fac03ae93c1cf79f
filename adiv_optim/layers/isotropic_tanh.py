"""The hyperbolic tangent of a row's length."""

import torch
from torch import Tensor, nn

from .._device import at_least_float32
from .forms import squared_length


class IsotropicTanh(nn.Module):
    r"""Bound the length of each row and keep its direction: :math:`\tanh(|x|)\, x / |x|`.

    Bird 2025, Eq. 29: unlike the elementwise tanh it commutes with every rotation. At 0 it is the identity to
    second order.

    Args:
        dim: the dimension, or dimensions, a row extends over; 1 for the channels of images.

    Shape:
        Input and output alike, any shape; integers come out as float32.

    Example:
        >>> import torch
        >>> IsotropicTanh()(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))  # tanh(5) = 0.9999
        tensor([[0.5999, 0.7999],
                [0.0000, 0.0000]])
    """

    def __init__(self, dim: int | tuple[int, ...] = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """Return tanh(|x|) x / |x|."""
        wide = at_least_float32(input)
        # Below the clamp tanh(r) / r is 1 to the last bit, as is its limit at 0, and has no derivative to pass on.
        # Clamped before the root, whose second derivative at 0 would be NaN.
        norm = squared_length(wide, self.dim).clamp(min=1e-24).sqrt()
        return (wide * (torch.tanh(norm) / norm)).to(input.dtype if input.is_floating_point() else wide.dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
