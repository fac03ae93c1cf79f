"""L2 normalisation without parameters."""

import torch.nn.functional as F
from torch import Tensor, nn


class L2Norm(nn.Module):
    r"""Divide each row by its Euclidean norm: :math:`x / \max(|x|, \epsilon)`.

    RMSNorm without parameters and without its factor √d. In front of a linear layer it is the norm-like
    structural correction of Bird 2025, Eq. 17 (`NormLikeLinear`).

    Args:
        dim: the dimension, or dimensions, a row extends over.
        eps: the norm is clamped from below at this value; zero rows stay zero.

    Shape:
        Input and output alike, any shape.

    Example:
        >>> import torch
        >>> L2Norm()(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """

    def __init__(self, dim: int | tuple[int, ...] = -1, eps: float = 1e-12) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        """Return x / max(|x|, eps)."""
        # F.normalize takes several dimensions too, though its stub names one.
        return F.normalize(input, dim=self.dim, eps=self.eps)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Return the constructor's arguments."""
        return f"dim={self.dim}, eps={self.eps}"
