"""Parts that `Whitened`, `Preconditioned` and `InputScaled` share: metrics, and rows that users count."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _device
from .covariance import Covariance
from .layer_inputs import LayerInputs
from .mapped import Mapped
from .roots import RightFactor


def count_rows(self: Mapped, layer: nn.Module, rows: Tensor) -> None:
    r"""Add rows, such as derivatives of inputs, to a layer's covariance, with 0 in the place of the bias's 1.

    A loss on derivatives of a network by its inputs, as of a physics-informed one, multiplies the weight by rows of
    derivatives as well: :math:`\partial(Wx + b) = W \partial x`. KFAC for PINNs (Dangel et al. 2024,
    arXiv 2405.15603) counts these beside the rows x~. Call it beside the forward pass; it does nothing before
    steps that do not measure. Rows count at the next measurement even if `zero_grad()` clears the gradient of their
    pass, so call it for no pass that is to be skipped.

    Args:
        self: the wrapper.
        layer: a layer of the model.
        rows: (…, in_features), or an input of a convolution; not differentiated.

    Raises:
        ValueError: the optimizer does not measure this layer.

    Example:
        >>> import torch
        >>> from adiv_optim import Whitened
        >>> layer, x = torch.nn.Linear(2, 1), torch.rand(5, 2)
        >>> opt = Whitened(torch.optim.Adam(layer.parameters()), layer)
        >>> slopes = layer.weight.expand(5, 2)  # ∂u/∂x; x itself has the derivatives (1, 0) and (0, 1)
        >>> opt.count_rows(layer, torch.eye(2).expand(5, 2, 2))
        >>> (layer(x).square().mean() + (slopes - 1).square().mean()).backward()
        >>> opt.step()
    """
    if self.watch is None:
        return
    watched = next((each for each in self.watch.layers if any(layer is module for module in each.modules)), None)
    if watched is None:
        path = next((path for path, module in self.model.named_modules() if module is layer), type(layer).__name__)
        raise ValueError(
            f"{type(self).__name__}.count_rows: {path!r} is no layer that it measures; coverage() lists those, and "
            "why it leaves others alone."
        )
    if watched.armed:
        watched.add(layer, rows, None, bias_entry=0)


def treatment(covariance: Covariance, factors: Sequence[RightFactor] | None, verb: str) -> str:
    """Say what is kept of the covariance: its rank, or all."""
    return f"{verb if factors else 'nothing measured yet'}, {covariance}"


def covariance_metrics(layers: Sequence[LayerInputs], damping: float) -> dict[str, float]:
    """Return of each layer the RMS of its inputs, and condition numbers of A and A + λI.

    The bias's 1 counts, and of blocks and groups the worst. Eigenvalues are found for it, at each call.
    """
    measured = [layer for layer in layers if layer.factors is not None]
    failures = sum(layer.failures for layer in layers)
    numbers: dict[str, float] = {"layers_measured": len(measured), "failed_factorisations": failures}
    for layer in measured:
        covariance: Any = layer.covariance
        level = _device.to_float64(covariance.mean_square())
        low, high = (_device.to_float64(ends) for ends in covariance.extremes())
        ridge = _device.to_float64(covariance.ridge(damping))
        numbers[f"{layer.name}/input_rms"] = level.mean().sqrt().item()
        numbers[f"{layer.name}/condition"] = torch.where(high > 0, high / low, 1.0).max().item()  # of no inputs but 0
        numbers[f"{layer.name}/damped_condition"] = ((high + ridge) / (low + ridge)).max().item()
    for key in ("condition", "damped_condition"):
        worst = (value for name, value in numbers.items() if name.endswith(f"/{key}"))
        numbers[f"largest_{key}"] = max(worst, default=1.0)
    return numbers
