"""What `Whitened`, `Preconditioned` and `InputScaled` share: their method `count_rows`, and words for `coverage`."""

from collections.abc import Sequence

from torch import Tensor, nn

from .._checks import describe
from .covariance import Covariance
from .mapped import Mapped
from .roots import RightFactor


def count_rows(self: Mapped, layer: nn.Module, rows: Tensor) -> None:
    r"""Add rows, such as derivatives of inputs, to a layer's covariance, with 0 in the place of the bias's 1.

    A loss on derivatives of a network by its inputs multiplies the weight by rows of derivatives as well,
    :math:`\partial(Wx + b) = W \partial x`; KFAC for PINNs (Dangel et al. 2024, arXiv 2405.15603) counts these, too.
    Call it beside the forward pass; it does nothing before steps that do not measure. Rows count even if `zero_grad()`
    clears the gradient of their pass.

    Args:
        self: the wrapper.
        layer: a layer of the model.
        rows: (…, in_features), or an input of a convolution; not differentiated.

    Raises:
        TypeError: `rows` is no tensor of rows.
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
    if not isinstance(rows, Tensor) or not rows.dim():
        raise TypeError(f"{type(self).__name__}.count_rows: rows is {describe(rows)}; pass (…, in_features).")
    if watched.armed:
        watched.add(layer, rows, None, bias_entry=0)


def treatment(covariance: Covariance, factors: Sequence[RightFactor] | None, verb: str) -> str:
    """Say what is kept of the covariance: its rank, or all."""
    return f"{verb if factors else 'nothing measured yet'}, {covariance}"
