"""The two structural forms, affine-like and norm-like, and linear layers of both."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import check_finite, check_not_negative, without_none
from .._device import at_least_float32
from .lengths import l2_normalize, sum_of_squares


def check_form(name: str, form: str, alpha: float, beta: float | None, eps: float = 0.0) -> None:
    """Refuse an unknown form, and settings for which it has no meaning."""
    if form not in ("affine-like", "norm-like"):
        raise ValueError(f"{name}: form is {form!r}; the forms are 'affine-like' and 'norm-like'.")
    check_finite(name, alpha=alpha)
    if alpha == 0:
        raise ValueError(f"{name}: alpha is 0, which cuts the input off; give it another value.")
    if form == "affine-like":
        check_finite(name, beta=beta)
        if beta == 0:
            remedy = "use the norm-like form there (NormLikeLinear, form='norm-like')"
            raise ValueError(f"{name}: beta is 0, which divides zeros by zero; {remedy}.")
        return
    check_not_negative(name, eps=eps)
    check_finite(name, **without_none(beta=beta))
    if beta is not None and not -1 < beta < 1:
        raise ValueError(f"{name}: beta is {beta}; it must lie strictly between -1 and 1, or be None.")


def affine_like_scale(squared_norm: Tensor, alpha: float, beta: float) -> Tensor:
    """Return α / √(α²|x|² + β²), the factor of Wx + (β/α) b in Eq. 37: α is taken out of the bracket."""
    return alpha * torch.rsqrt(alpha**2 * squared_norm + beta**2)


def norm_like_factors(alpha: float, beta: float | None) -> tuple[float, float]:
    """Return the factors of W x/|x| and of b: Eq. 17, or Eq. 35 if `beta` is given."""
    if beta is None:
        return math.copysign(1, alpha), 1.0
    return math.copysign(math.sqrt(1 - beta**2), alpha), beta


class AffineLikeLinear(nn.Linear):
    r"""Linear map divided by √(|x|² + 1), the length of [x, 1].

    .. math:: z = (\alpha Wx + \beta b) / \sqrt{\alpha^2|x|^2 + \beta^2}

    Bird 2025, Eq. 37; with :math:`\alpha = \beta = 1` Eq. 19. A gradient step then moves the output of a lone
    sample by exactly :math:`-\eta g`. Unlike a normaliser it tells rows of different length apart, and there is no
    singularity at x = 0. Of rows beyond 2·10¹⁹ in float32 squares overflow, and z is 0.

    With `bias=False`, β only softens small inputs: the step is
    :math:`-\eta g\,\alpha^2|x|^2 / (\alpha^2|x|^2 + \beta^2)`.

    Args:
        args, kwargs: as for torch.nn.Linear, by position or by name.
        alpha: coefficient of Wx, by name; finite and not 0.
        beta: coefficient of b, by name; finite and not 0.

    Shape:
        Input (..., in_features), output (..., out_features).

    Raises:
        ValueError: `alpha` or `beta` is 0, where zero rows would be divided by zero, or not finite.

    Example:
        >>> import torch
        >>> layer = AffineLikeLinear(2, 1)
        >>> _ = layer.weight.data.fill_(1.0), layer.bias.data.fill_(2.0)
        >>> layer(torch.tensor([[2.0, 2.0]])).item()  # (4 + 2) / sqrt(8 + 1)
        2.0
    """

    def __init__(self, *args: Any, alpha: float = 1.0, beta: float = 1.0, **kwargs: Any) -> None:
        check_form("AffineLikeLinear", "affine-like", alpha, beta)
        super().__init__(*args, **kwargs)
        self.alpha = alpha
        self.beta = beta

    def forward(self, input: Tensor) -> Tensor:
        wide = at_least_float32(input)
        scale = affine_like_scale(sum_of_squares(wide, -1), self.alpha, self.beta)
        # The rows are scaled, not the outputs, which would have to be kept for the backward pass and read twice more.
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

    whose step with a bias is exactly :math:`-\eta g` (:math:`-(1 - \beta^2)\eta g` without). Of α only the sign is
    left, in Eq. 17 too.

    Args:
        args, kwargs: as for torch.nn.Linear, by position or by name.
        alpha: its sign is that of Wx, by name; finite and not 0.
        beta: coefficient of b, by name, strictly between -1 and 1; None is Eq. 17.
        eps: |x| is clamped from below at this value, by name; zero rows give βb, or b, and so do rows beyond 2·10¹⁹ in
            float32, whose squares overflow.

    Shape:
        Input (..., in_features), output (..., out_features).

    Raises:
        ValueError: `beta` outside (-1, 1), `alpha` 0 or not finite, or `eps` negative.

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
        check_form("NormLikeLinear", "norm-like", alpha, beta, eps)
        super().__init__(*args, **kwargs)
        self.alpha = alpha
        self.beta = beta
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        gain, shift = norm_like_factors(self.alpha, self.beta)
        direction = l2_normalize(input, -1, self.eps)
        return F.linear(direction * gain, self.weight, None if self.bias is None else shift * self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}, beta={self.beta}, eps={self.eps}"
