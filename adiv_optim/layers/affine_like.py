"""The affine-like structural correction."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._device import at_least_float32
from .forms import affine_like_scale, check_affine_like, squared_length


class AffineLikeLinear(nn.Linear):
    r"""Linear map divided by the length of its input and the bias's 1, √(|x|² + 1).

    .. math:: z = (\alpha Wx + \beta b) / \sqrt{\alpha^2|x|^2 + \beta^2}

    Bird 2025, Eq. 37; with :math:`\alpha = \beta = 1` Eq. 19. A gradient step then moves the output of a lone
    sample by exactly :math:`-\eta g`. Unlike a normaliser it keeps the length of x: no direction of the input
    is lost, and there is no singularity at x = 0.

    With `bias=False`, β only softens small inputs: the step is
    :math:`-\eta g\,\alpha^2|x|^2 / (\alpha^2|x|^2 + \beta^2)`.

    Args:
        args, kwargs: as for torch.nn.Linear, by position or by name.
        alpha: weight of the linear part; must not be 0.
        beta: weight of the bias; must not be 0.

    Shape:
        Input (..., in_features), output (..., out_features).

    Raises:
        ValueError: `alpha` is 0, or `beta` is, where zero rows would be divided by zero.

    Example:
        >>> import torch
        >>> layer = AffineLikeLinear(2, 1)
        >>> _ = layer.weight.data.fill_(1.0), layer.bias.data.fill_(2.0)
        >>> layer(torch.tensor([[2.0, 2.0]])).item()  # (4 + 2) / sqrt(8 + 1)
        2.0
    """

    def __init__(self, *args: Any, alpha: float = 1.0, beta: float = 1.0, **kwargs: Any) -> None:
        check_affine_like("AffineLikeLinear", alpha, beta)
        super().__init__(*args, **kwargs)
        self.alpha = alpha
        self.beta = beta

    def forward(self, input: Tensor) -> Tensor:
        """Return (αWx + βb) / √(α²|x|² + β²)."""
        wide = at_least_float32(input)
        scale = affine_like_scale(squared_length(wide, -1), self.alpha, self.beta)
        # The rows are scaled, not the outputs: those would have to be kept for the backward pass, and read twice more.
        rows = (wide * scale).to(input.dtype)
        if self.bias is None:
            return F.linear(rows, self.weight)
        bias = (scale * (self.beta / self.alpha) * self.bias).to(self.weight.dtype)
        count = math.prod(input.shape[:-1])  # not -1, which layers without features leave undetermined
        flat = bias.reshape(count, self.out_features), rows.reshape(count, input.shape[-1])
        return torch.addmm(*flat, self.weight.t()).view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}, beta={self.beta}"
