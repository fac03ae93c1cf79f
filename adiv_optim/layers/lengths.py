"""The lengths of rows, and the layers that divide by them or bound them: L2Norm and IsotropicTanh."""

import torch
from torch import Tensor, nn

from .._checks import check_not_negative
from .._device import at_least_float32


def sum_of_squares(input: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return |x|² over dimensions, which stay with size 1."""
    # Not by a norm, whose second derivative at 0 is NaN. And x·x has a cheaper backward than x.square().
    squares = (input * input.conj()).real if input.is_complex() else input * input
    return squares.sum(dim, keepdim=True)


def inverse_norm(squared_norm: Tensor, eps: float) -> Tensor:
    """Return 1 / max(|x|, eps), and 0 for x = 0: zeros stay zeros and pass no gradient."""
    return squared_norm.clamp(min=eps**2).masked_fill(squared_norm == 0, torch.inf).rsqrt()


def cast_back(output: Tensor, input: Tensor) -> Tensor:
    """Return an output in the input's dtype; for integers, in the dtype of `at_least_float32` that it has."""
    return output.to(input.dtype) if input.is_floating_point() else output


def l2_normalize(input: Tensor, dim: int | tuple[int, ...], eps: float) -> Tensor:
    """Return x / max(|x|, eps), with the norm in float32 at least; a zero row stays zero and passes no gradient."""
    # Not torch's normalize, which multiplies the gradient of a zero row by 1 / eps, and whose eps is 0 in float16.
    wide = at_least_float32(input)
    # A factor has a cheaper backward than a quotient.
    return cast_back(wide * inverse_norm(sum_of_squares(wide, dim), eps), input)


class L2Norm(nn.Module):
    r"""Divide each row by its Euclidean norm: :math:`x / \max(|x|, \epsilon)`.

    RMSNorm without parameters and without its factor √d. In front of a linear layer it is the norm-like
    structural correction of Bird 2025, Eq. 17 (`NormLikeLinear`); over channels and places of images,
    `dim=(1, 2, 3)`, the layerwise L2 norm of appendix B.2. `ChannelScale` adds parameters.

    Args:
        dim: the dimension, or dimensions, a row extends over.
        eps: the norm is clamped from below at this value; zero rows stay zero and pass no gradient. Beyond the square
            root of float32's range, 2·10¹⁹ and 10⁻²², squares overflow or vanish, and rows are as if infinite or zero.

    Shape:
        Input and output alike, any shape; integers come out as float32.

    Raises:
        ValueError: `eps` is negative.

    Example:
        >>> import torch
        >>> L2Norm()(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """

    def __init__(self, dim: int | tuple[int, ...] = -1, eps: float = 1e-12) -> None:
        check_not_negative("L2Norm", eps=eps)
        super().__init__()
        self.dim = dim
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        return l2_normalize(input, self.dim, self.eps)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, eps={self.eps}"


class IsotropicTanh(nn.Module):
    r"""Bound the length of each row and keep its direction: :math:`\tanh(|x|)\, x / |x|`.

    Bird 2025, Eq. 29: unlike the elementwise tanh it commutes with every rotation. At 0 it is the identity to
    second order. Rows beyond 2·10¹⁹ in float32, whose squares overflow, come out as 0.

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
        wide = at_least_float32(input)
        # Below the clamp tanh(r) / r is 1 to the last bit, as is its limit at 0, and has no derivative to pass on.
        # Clamped before the root, whose second derivative at 0 would be NaN.
        norm = sum_of_squares(wide, self.dim).clamp(min=torch.finfo(wide.dtype).eps / 2).sqrt()
        return cast_back(wide * (torch.tanh(norm) / norm), input)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
