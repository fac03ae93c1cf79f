"""L2 normalisation without parameters."""

from torch import Tensor, nn

from .._checks import check_not_negative
from .._device import at_least_float32
from .forms import inverse_norm, squared_length


def unit(input: Tensor, dim: int | tuple[int, ...], eps: float) -> Tensor:
    """Return x / max(|x|, eps), with the norm in float32 at least; a zero row stays zero and passes no gradient."""
    # Not torch's normalize, which multiplies the gradient of a zero row by 1 / eps, and whose eps is 0 in float16.
    wide = at_least_float32(input)
    # A factor has a cheaper backward than a quotient.
    output = wide * inverse_norm(squared_length(wide, dim), eps)
    return output.to(input.dtype if input.is_floating_point() else wide.dtype)


class L2Norm(nn.Module):
    r"""Divide each row by its Euclidean norm: :math:`x / \max(|x|, \epsilon)`.

    RMSNorm without parameters and without its factor √d. In front of a linear layer it is the norm-like
    structural correction of Bird 2025, Eq. 17 (`NormLikeLinear`); over channels and places of images,
    `dim=(1, 2, 3)`, the layerwise L2 norm of appendix B.2. `ChannelScale` adds parameters.

    Args:
        dim: the dimension, or dimensions, a row extends over.
        eps: the norm is clamped from below at this value; zero rows stay zero and pass no gradient.

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
        """Return x / max(|x|, eps)."""
        return unit(input, self.dim, self.eps)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, eps={self.eps}"
