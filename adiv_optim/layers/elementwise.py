"""Elementwise stand-ins for normalisers: DyT, DyISRU and MeanFieldNorm."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_positive, without_none
from .._device import at_least_float32
from ..diagnostics.activations import gaussian_moments
from .channel_scale import ChannelScale
from .lengths import cast_back


class _Dynamic(ChannelScale):
    """The base of layers that put a bounded function of each number, with a trained scalar, before γ and β."""

    def _add_scalar(self, name: str, initial: float, channels: dict[str, Any]) -> None:
        empty = torch.empty((1,), device=channels.get("device"), dtype=channels.get("dtype"))
        self.register_parameter(name, nn.Parameter(empty))
        self._initial[name] = initial
        self.reset_parameters()


class DyT(_Dynamic):
    r"""Dynamic tanh: :math:`y = \gamma \odot \tanh(\alpha x) + \beta`, with α trained.

    Zhu et al. 2025, "Transformers without normalization": no statistics, elementwise. With `sqrt_d`
    the form that follows from RMSNorm's gradient (Su 2025), whose bound ±√d it keeps,

    .. math:: y = \gamma \odot \sqrt{d}\,\tanh\!\big(x / (\rho\sqrt{d})\big) + \beta,

    where α is 1/ρ and ρ stands for the root mean square of a row.

    Args:
        normalized_shape: the number of channels, or several numbers as for nn.LayerNorm; d is their product.
        alpha: the first value of α, in either form the slope at 0; positive.
        sqrt_d: keep √d explicit.
        channels: dim, elementwise_affine, bias, device and dtype, as for `ChannelScale`.

    Shape:
        Input and output alike, `normalized_shape` at `dim`.

    Raises:
        ValueError: a size or `alpha` that is not positive; in the forward pass, an input with other channels.

    Example:
        >>> import torch
        >>> DyT(2)(torch.tensor([[0.0, 2.0]]))  # tanh(0.5 x)
        tensor([[0.0000, 0.7616]], grad_fn=<AddBackward0>)
    """

    alpha: nn.Parameter

    def __init__(
        self, normalized_shape: int | Sequence[int], *, alpha: float = 0.5, sqrt_d: bool = False, **channels: Any
    ) -> None:
        check_positive("DyT", alpha=alpha)
        super().__init__(normalized_shape, **channels)
        self.initial_alpha, self.sqrt_d = alpha, sqrt_d
        self._add_scalar("alpha", alpha, channels)

    def forward(self, input: Tensor) -> Tensor:
        self._check_shape(input)
        bound = math.sqrt(self.features) if self.sqrt_d else 1.0  # torch 2.9 exports no division by a whole number
        return self._affine(bound * torch.tanh(self.alpha / bound * input))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.initial_alpha}, sqrt_d={self.sqrt_d}"


class DyISRU(_Dynamic):
    r"""Dynamic inverse square root unit: :math:`y = \gamma \odot \sqrt{d}\,x / \sqrt{x^2 + C} + \beta`, with C trained.

    Stollenwerk 2025 and Su 2025: RMSNorm as far as a function of each number by itself can be; with
    :math:`C_i = \sum_{j \ne i} x_j^2` it is RMSNorm. C stays positive: its logarithm is trained.

    Args:
        normalized_shape, channels: as for `DyT`.
        c: the first value of C, positive. The papers name none; None makes the slope at 0 one, as RMSNorm's is on
            rows of root mean square 1: C = d, or 1 without √d.
        sqrt_d: keep √d explicit; if not, γ is to learn it.

    Shape and errors are those of `DyT`, with `c` in the place of `alpha`.

    Example:
        >>> import torch
        >>> DyISRU(2, c=16.0, sqrt_d=False)(torch.tensor([[0.0, 3.0]]))
        tensor([[0.0000, 0.6000]], grad_fn=<AddBackward0>)
    """

    log_c: nn.Parameter

    def __init__(
        self, normalized_shape: int | Sequence[int], *, c: float | None = None, sqrt_d: bool = True, **channels: Any
    ) -> None:
        check_positive("DyISRU", **without_none(c=c))
        super().__init__(normalized_shape, **channels)
        self.initial_c = c if c is not None else self.features if sqrt_d else 1
        self.sqrt_d = sqrt_d
        self._add_scalar("log_c", math.log(self.initial_c), channels)

    @property
    def c(self) -> Tensor:
        """C as it is now, in float32 at least."""
        # In float16 C itself would overflow where d is large.
        return at_least_float32(self.log_c).exp()

    def forward(self, input: Tensor) -> Tensor:
        self._check_shape(input)
        wide = at_least_float32(input)
        # x and √C are divided by the larger before they are squared: x² alone overflows from 2·10¹⁹ on in float32.
        root_c = self.c.to(wide.dtype).sqrt()
        larger = torch.maximum(wide.detach().abs(), root_c.detach())
        wide, root_c = wide / larger, root_c / larger
        output = cast_back(wide * torch.rsqrt(wide.square() + root_c.square()), input)
        return self._affine(math.sqrt(self.features) * output if self.sqrt_d else output)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, c={self.initial_c}, sqrt_d={self.sqrt_d}"


class MeanFieldNorm(nn.Module):
    r"""An activation whose outputs are centred and normalised by its own constants instead of by statistics.

    .. math:: y = \frac{\sigma(x) - c_0}{\sqrt{\sum_{k \ge 1} c_k^2}}, \qquad
              c_0 = E[\sigma(z)], \quad \sum_{k \ge 1} c_k^2 = \mathrm{Var}\,\sigma(z), \quad z \sim N(0, 1)

    Joudaki et al. 2023, Secs. 6.1 and 6.2. It takes the place of activation, centring and normalising: in a wide
    layer whose inputs x are standard normal (weights N(0, 1/fan_in), rows of squared length fan_in) the mean and the
    deviation that LayerNorm without parameters would measure tend to these constants. Nothing is measured, so rows stay
    as different in length as they are; networks whose pre-activations drift from N(0, 1) are not brought back.

    The constants are computed once: an activation that is trained afterwards keeps those it was built with.

    Args:
        activation: an elementwise module or function.
        center: subtract c₀.
        normalize: divide by √Var σ(z).

    Shape:
        Input and output alike, any shape.

    Raises:
        TypeError: the activation is not callable.
        ValueError: it is not elementwise, is random, not finite, of infinite variance, or a constant to be normalised.

    Example:
        >>> import torch
        >>> MeanFieldNorm(torch.nn.ReLU())
        MeanFieldNorm(
          center=True, normalize=True, mean=0.398942, std=0.583819
          (activation): ReLU()
        )
        >>> MeanFieldNorm(torch.exp, normalize=False)(torch.zeros(1))  # 1 − √e
        tensor([-0.6487])
    """

    def __init__(self, activation: Callable[[Tensor], Tensor], *, center: bool = True, normalize: bool = True) -> None:
        super().__init__()
        moments = gaussian_moments(activation)
        if normalize and moments.is_constant:
            raise ValueError(
                f"MeanFieldNorm: activation is the constant {moments.mean:g}, without a variance to divide by."
            )
        self.activation = activation
        self.center = center
        self.normalize = normalize
        self.mean = moments.mean
        self.std = math.sqrt(moments.variance)

    def forward(self, input: Tensor) -> Tensor:
        output = self.activation(input)
        if self.center:
            output = output - self.mean
        return output / self.std if self.normalize else output

    def extra_repr(self) -> str:
        # A function, unlike a module, is shown by no submodule.
        name = "" if isinstance(self.activation, nn.Module) else f"{getattr(self.activation, '__name__', 'function')}, "
        return f"{name}center={self.center}, normalize={self.normalize}, mean={self.mean:.6g}, std={self.std:.6g}"
