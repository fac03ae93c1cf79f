"""Isometry of every layer's outputs, read off the forward passes of a model as they happen."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_count, describe
from .._device import widest
from ..jacobian.modules import choose_layers
from ..rows.models import layers_of
from ._isometry import isometry_gap
from ._rows import evenly


def samples(output: Tensor) -> Tensor:
    """Return samples as `record` takes them: rows of (B, d), tokens of each sequence of (B, T, d), else images."""
    return output if output.dim() <= 3 else output.flatten(1)


class IsometryRecorder:
    """The measurements of `record`, which returns it. `remove()` stops them, and so does the end of a `with`.

    Attributes:
        history: one entry per measured forward pass: "step" (its index among passes), "training" (the model's mode)
            and "layers", an entry per call: "path", "kind", "samples" (n), "isometry" and "gap", means over a batch's
            sequences.
        left_out: path → why a layer's output has no Gram matrix.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Module],
        every: int,
        rows: Callable[[Tensor], Tensor],
        max_samples: int,
    ) -> None:
        self.every = every
        self.rows = rows
        self.max_samples = max_samples
        self.passes = 0
        self.history: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}
        self._measuring = False
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            # Partials of a method: the model can still be copied and pickled.
            *(layer.register_forward_hook(partial(self._measure, path)) for path, layer in layers.items()),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the model; the history stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def metrics(self) -> dict[str, float]:
        """Return the last measurement as a flat dict of numbers, for any logger; empty before the first time.

        The names are "isometry/path/samples", "isometry/path/isometry" and "isometry/path/gap". Of a layer that ran
        several times the last call counts.
        """
        calls = self.history[-1]["layers"] if self.history else []
        numbers = ("samples", "isometry", "gap")
        return {f"isometry/{call['path']}/{name}": float(call[name]) for call in calls for name in numbers}

    def __enter__(self) -> "IsometryRecorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    @torch.compiler.disable
    def _enter(self, model: nn.Module, args: Any) -> None:
        self._measuring = self.passes % self.every == 0
        if self._measuring:
            self.history.append({"step": self.passes, "training": model.training, "layers": []})
        self.passes += 1

    @torch.compiler.disable
    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        self._measuring = False  # a layer that is called by itself, or again by a checkpoint's backward, is no pass

    @torch.compiler.disable
    @torch.no_grad()
    def _measure(self, path: str, layer: nn.Module, args: Any, output: Any) -> None:
        if not self._measuring:
            return
        rows = self.rows(output) if _has_rows(output) else output
        if not _has_rows(rows):
            # Nested as torch's TransformerEncoder makes them of padded sequences in evaluation.
            kind = "a nested tensor" if isinstance(rows, Tensor) and rows.is_nested else describe(rows)
            self.left_out[path] = f"its samples are {kind}; wanted are floating-point numbers (..., n, features)"
            return
        rows = widest(rows[..., evenly(rows.shape[-2], self.max_samples, rows.device), :])
        gap = isometry_gap(rows @ rows.mT)
        self.history[-1]["layers"].append(
            {
                "path": path,
                "kind": type(layer).__name__,
                "samples": rows.shape[-2],
                "isometry": torch.exp(-gap).mean().item(),
                "gap": gap.mean().item(),
            }
        )


def _has_rows(output: Any) -> bool:
    is_dense = isinstance(output, Tensor) and not output.is_nested
    return is_dense and output.is_floating_point() and output.dim() >= 2


def record(
    model: nn.Module,
    *,
    layers: Iterable[str] | None = None,
    every: int = 1,
    rows: Callable[[Tensor], Tensor] = samples,
    max_samples: int = 512,
) -> IsometryRecorder:
    r"""Record the isometry of every layer's output in each forward pass, at initialisation or in training.

    For every layer's output it forms the Gram matrix :math:`G_{ij} = \langle x_i, x_j \rangle` of the samples in
    float64, and keeps `isometry` and `isometry_gap`. Samples are those of Joudaki et al. 2023:

    - (B, d): the rows, one Gram matrix of the batch.
    - (B, T, d): the tokens of a sequence (App. B.4), one T × T matrix each, over which the numbers are averaged.
    - (B, C, H, W) and beyond: whole images, flattened.

    More samples than features, or a sample that comes twice, make a Gram matrix singular: isometry 0, gap ∞.

    It reads through forward hooks and changes nothing: outputs, gradients, buffers and the random generators are those
    of the model without it, bit for bit (but hooks switch off the fused path of torch's transformer layers in
    evaluation). The cost is O(n² d) per layer and measured pass, and a synchronisation with a GPU; `every` lowers it.

    Args:
        model: whose forward passes are recorded. Call torch.compile only after `record`, or hooks do not run.
        layers: paths of the modules to measure; by default every one without submodules, parametrized or not, as it is
            called.
        every: measure the passes 0, every, 2 · every, …, whether in training or in evaluation.
        rows: from a layer's output to its samples, (..., n, features), if not as above: `lambda z: z.flatten(1)` for
            the (B, C, L) of 1-D convolutions, `lambda z: z.flatten(0, -2)` for all tokens of a batch in one matrix.
        max_samples: samples in one Gram matrix, evenly spaced, the same ones every time. The numbers depend on it.

    Returns:
        The `IsometryRecorder`; read its `history`, and call its `remove()` in the end.

    Raises:
        TypeError: `layers` is a string.
        ValueError: a path that is not in the model, `every` or `max_samples` below 1.

    Example:
        >>> import torch
        >>> from adiv_optim.diagnostics import record
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.LayerNorm(64))
        >>> with record(model) as recorder:
        ...     _ = model(torch.randn(4, 8))
        >>> [(layer["path"], layer["kind"], 0 < layer["isometry"] < 1) for layer in recorder.history[0]["layers"]]
        [('0', 'Linear', True), ('1', 'Tanh', True), ('2', 'LayerNorm', True)]
    """
    check_count("record", every=every, max_samples=max_samples)
    if layers is None:
        modules = layers_of(model).items()
        layers = [path for path, module in modules if module._modules.keys() <= {"parametrizations"}]
    return IsometryRecorder(model, choose_layers(model, layers)[0], every, rows, max_samples)
