"""Optimizers whose steps are divided by the size of the inputs of every layer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .. import _device
from .._checks import check_positive
from ..rows.models import Skip
from .by_inputs import count_rows
from .covariance import MeanSquare
from .mapped import Mapped
from .measurements import ChangeOfVariables
from .roots import Scales
from .watch import Watch


def scales(covariance: MeanSquare, floor: float) -> list[Scales]:
    """Return 1 / max(floor, r)."""
    (size,) = _device.read(covariance.mean_square().sqrt())
    return [Scales([1 / max(floor, size)])]


def _treatment(covariance: MeanSquare, factors: Sequence[Scales] | None) -> str:
    """Say how large the inputs are, and the divisor of the steps."""
    if factors is None:
        return "nothing measured yet"
    return f"divided by {factors[0].divisor:.3g}, input RMS {covariance.mean_square().sqrt().item():.3g}"


class InputScaled(Mapped):
    r"""Let any optimizer step in variables in which no layer's inputs have an RMS above 1.

    With r the running root mean square of the entries of a layer's rows (samples, tokens or patches), and
    s = max(floor, r), the optimizer sees

    .. math:: W' = W s, \qquad G' = G / s

    and its step is added to the weight as ΔW' / s; the bias takes the plain step. It divides the step of an optimizer
    whose steps have a size of their own (Adam, Muon) by s, and that of SGD by s², as `Proportional` does by row. Where
    r is at most the floor, 1, as behind normalisers, steps stay as they are, bit for bit. Which layers are treated,
    when r is measured, and how micro-batches, processes, compilation and checkpoints behave is as for `Whitened`.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS that reads only p and p.grad.
        model: the model.
        every, decay, process_group, skip: as for `Whitened`.
        floor: the least s. At 1 steps are never made larger; below it, those of layers that read small inputs are.
        hold: keep W' and not W when s is measured anew, so that a layer whose inputs grow has its weight shrunk by as
            much, at the next step with a learning rate that is not 0. The outputs of the network then move a little.

    Raises:
        TypeError, ValueError: as `Whitened`.

    Example:
        >>> import torch
        >>> from adiv_optim import InputScaled
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> opt = InputScaled(torch.optim.Adam(model.parameters(), lr=0.1), model)
        >>> x = torch.full((1, 4), 5.0)
        >>> before = model(x)
        >>> before.sum().backward()
        >>> opt.step()
        >>> round(before.item() - model(x).item(), 4)  # 0.1 for each of four entries, whatever their size
        0.4
    """

    count_rows = count_rows

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        every: int = 10,
        decay: float = 0.9,
        floor: float = 1.0,
        hold: bool = False,
        process_group: Any = None,
        skip: Skip = (),
    ) -> None:
        check_positive("InputScaled", floor=floor)
        plain = "a bias moves its output by its own step, whatever the layer reads"
        change = ChangeOfVariables(
            MeanSquare, partial(scales, floor=floor), _treatment, why_bias_is_plain=plain, holds=hold
        )
        watch = Watch(
            "InputScaled", model, change, every=every, decay=decay, process_group=process_group, skip=skip,
            floor=floor, hold=hold,
        )  # fmt: skip
        super().__init__(optimizer, watch)
