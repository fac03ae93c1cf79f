"""Activations that are centred and normalised by constants of their own."""

import math
from collections.abc import Callable

from torch import Tensor, nn

from ..diagnostics.activations import gaussian_moments


class MeanFieldNorm(nn.Module):
    r"""An activation whose outputs are centred and normalised by its own constants instead of by statistics.

    .. math:: y = \frac{\sigma(x) - c_0}{\sqrt{\sum_{k \ge 1} c_k^2}}, \qquad
              c_0 = E[\sigma(z)], \quad \sum_{k \ge 1} c_k^2 = \mathrm{Var}\,\sigma(z), \quad z \sim N(0, 1)

    Joudaki et al. 2023, Secs. 6.1 and 6.2. It takes the place of activation, centring and normalising: in a wide
    layer whose inputs x are standard normal (weights N(0, 1/fan_in), rows of squared length fan_in) the mean and the
    deviation that LayerNorm without parameters would measure tend to these constants. Nothing is measured, so rows stay
    as different in length as they are; networks whose pre-activations drift from N(0, 1) are not brought back.

    The constants are numbers, computed once by `adiv_optim.diagnostics.gaussian_moments`: the state dict has the
    activation's entries alone, any dtype and device will do, and exporters fold them in. An activation that is trained
    afterwards keeps the constants it was built with.

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
        """Return (σ(x) − c₀) / √Var σ(z), or the steps of it that are switched on."""
        output = self.activation(input)
        if self.center:
            output = output - self.mean
        return output / self.std if self.normalize else output

    def extra_repr(self) -> str:
        """Return the switches and the constants, after the name of a function, which no submodule shows."""
        name = "" if isinstance(self.activation, nn.Module) else f"{getattr(self.activation, '__name__', 'function')}, "
        return f"{name}center={self.center}, normalize={self.normalize}, mean={self.mean:.6g}, std={self.std:.6g}"
