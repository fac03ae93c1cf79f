"""Linear layers in the two structural forms, affine-like and norm-like."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._device import at_least_float32
from .forms import affine_like_scale, check_affine_like, check_norm_like, norm_like_factors, squared_length
from .l2_norm import unit


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


class NormLikeLinear(nn.Linear):
    r"""Linear map of the input's direction: :math:`z = W x/|x| + b`.

    Bird 2025, Eq. 17: L2 normalisation in front of a linear layer. A gradient step moves the output of a lone
    sample by :math:`-2\eta g` (:math:`-\eta g` without a bias), so half the learning rate is the like-for-like one.
    With `beta` given the general form, Eq. 35,

    .. math:: z = \alpha W x / s + \beta b, \qquad s = \sqrt{\alpha^2 |x|^2 / (1 - \beta^2)},

    whose step is exactly :math:`-\eta g`; of α only the sign is left in it.

    Args:
        args, kwargs: as for torch.nn.Linear, by position or by name.
        alpha: weight of the linear part in the general form; must not be 0.
        beta: weight of the bias, strictly between -1 and 1; None is Eq. 17.
        eps: |x| is clamped from below at this value; zero rows give b.

    Shape:
        Input (..., in_features), output (..., out_features).

    Raises:
        ValueError: `beta` outside (-1, 1), `alpha` 0, or `eps` negative.

    Example:
        >>> import torch
        >>> layer = NormLikeLinear(2, 1)
        >>> _ = layer.weight.data.fill_(1.0), layer.bias.data.fill_(2.0)
        >>> round(layer(torch.tensor([[3.0, 4.0]])).item(), 4)  # 7/5 + 2
        3.4
    """

    def __init__(
        self, *args: Any, alpha: float = 1.0, beta: float | None = None, eps: float = 1e-12, **kwargs: Any
    ) -> None:
        check_norm_like("NormLikeLinear", alpha, beta, eps)
        super().__init__(*args, **kwargs)
        self.alpha = alpha
        self.beta = beta
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        """Return W x/|x| + b, or the general form if `beta` is given."""
        gain, shift = norm_like_factors(self.alpha, self.beta)
        direction = unit(input, -1, self.eps)
        return F.linear(direction * gain, self.weight, None if self.bias is None else shift * self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}, beta={self.beta}, eps={self.eps}"
