"""Measuring every so many steps of a training loop."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .._linalg.limits import check_count
from ..corrections import Correction
from ._copies import own_optimizer
from ._divergence import check_arguments, divergence
from ._logged import scalars, write_json
from ._result import Divergence, columns


class DivergenceRecorder:
    """Call `divergence` on every n-th batch of a training loop, and keep the summaries.

    It holds no hooks and leaves nothing on the model or the optimizer: to remove it, stop calling it. A call that
    does not measure only counts.

    Args:
        model: as for `divergence`, and so are `loss_fn`, `optimizer`, `correction`, `layers` and `max_rows`.
        every: measure the calls 0, every, 2 · every, …

    Attributes:
        history: a summary of each measurement (see `Divergence.summary`) with its number of call as "step".

    Raises:
        TypeError: not a correction, or not an optimizer with a step to measure.
        ValueError: `every` is below 1, or `divergence` cannot measure these together.

    Example:
        >>> import torch
        >>> from adiv_optim.diagnostics import DivergenceRecorder
        >>> model, mse = torch.nn.Linear(3, 1), torch.nn.functional.mse_loss
        >>> opt = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> recorder = DivergenceRecorder(model, mse, opt, every=2)
        >>> for _ in range(4):
        ...     x, y = torch.randn(8, 3), torch.randn(8, 1)
        ...     _ = recorder.step(x, y)  # before the step is taken, so that it is this step that is measured
        ...     opt.zero_grad()
        ...     mse(model(x), y).backward()
        ...     opt.step()
        >>> [entry["step"] for entry in recorder.history]
        [0, 2]
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: Optimizer | None = None,
        correction: Correction | None = None,
        every: int = 100,
        *,
        layers: Iterable[str] | None = None,
        max_rows: int = 1024,
    ) -> None:
        check_count("DivergenceRecorder", every=every)
        optimizer = own_optimizer(optimizer)
        check_arguments(model, optimizer, correction)
        layers = layers if layers is None or isinstance(layers, str) else list(layers)
        self._divergence: Callable[[Any, Any], Divergence] = partial(
            divergence, model, loss_fn, correction=correction, optimizer=optimizer, layers=layers, max_rows=max_rows
        )
        self.every = every
        self.calls = 0
        self.history: list[dict[str, Any]] = []

    def step(self, inputs: Any, targets: Any) -> Divergence | None:
        """Count the call, and measure if it is its turn.

        Args:
            inputs: as for `divergence`.
            targets: handed to the loss.

        Returns:
            The measurement, or None.
        """
        number, self.calls = self.calls, self.calls + 1
        if number % self.every:
            return None
        found = self._divergence(inputs, targets)
        self.history.append({"step": number, **found.summary()})
        return found

    def not_downhill(self) -> dict[str, float]:
        """Return the share of measured steps that were not downhill: by layer path, and in total under "total".

        A layer of the path "total" goes by "total.", which no path is.

        A step whose descent is NaN, as one at rate 0, has no verdict; without any verdict the share is NaN.
        """
        steps: dict[str, list[Mapping[str, Any]]] = {}
        for entry in self.history:
            for path, layer in entry["layers"].items():
                steps.setdefault("total." if path == "total" else path, []).append(layer)
        return {path: _share_not_downhill(layers) for path, layers in steps.items()} | {
            "total": _share_not_downhill(self.history)
        }

    def metrics(self) -> dict[str, float]:
        """Return the last measurement as a flat dict of numbers, for any logger; empty before the first time.

        The names are "divergence/descent", and "divergence/path/column" with the columns of the printed table.
        """
        if not self.history:
            return {}
        last = self.history[-1]
        layers = {path: columns(summary) for path, summary in last["layers"].items()}
        return {"divergence/descent": last["descent"], **scalars("divergence", layers)}

    def save(self, path: str | Path) -> None:
        """Write history and shares as JSON; a number that is not finite becomes null."""
        write_json(path, {"every": self.every, "not_downhill": self.not_downhill(), "history": self.history})


def _share_not_downhill(steps: Iterable[Mapping[str, Any]]) -> float:
    flags = [step["descends"] for step in steps if not math.isnan(step["descent"])]
    return 1 - sum(flags) / len(flags) if flags else math.nan
