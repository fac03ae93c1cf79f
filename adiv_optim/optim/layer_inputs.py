"""Sums over the inputs of layers, from forward passes; they count once a backward pass has come by.

In a graph of torch.compile one operation counts, which the compiler does not look into. Within transforms of torch.func
the rows are those of the primal tensor, once: tangents add none, and a dimension that vmap maps over is one more of
rows. Of neither is a backward pass seen: their rows count at once, if the weight has a gradient at the step.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .. import _device
from .._device import without_autocast
from .._distributed import local
from .._torch import DisableTorchFunctionSubclass, FakeTensor, is_within_transform, outside_transforms, plain_tensor
from ..rows.layers import Layout
from ..rows.matrices import patches_of, rows_within
from .calls import Call, InputHook, node_of, nodes_of
from .covariance import MeanSquare, Sums, added


class LayerInputs:
    """Sums over the inputs of a layer, and their running mean; one for each weight: modules that share one add up.

    Args:
        name: the weight's name, for messages and checkpoints.
        modules: layers whose rows are known, all with the same weight, and the same bias if `with_bias`.
        with_bias: whether the bias is treated with the weight.
        make: (layer, with_bias) → the covariance of its inputs, before the first row.
    """

    def __init__(
        self, name: str, modules: list[nn.Module], with_bias: bool, make: Callable[[nn.Module, bool], MeanSquare]
    ) -> None:
        self.name, self.modules, self.with_bias, self.make = name, modules, with_bias, make
        #: The optimizer's parameters: between a forward and its backward the modules of fully_shard hold others.
        self.weight: nn.Parameter = modules[0].get_parameter("weight")
        self.bias: nn.Parameter | None = modules[0].get_parameter("bias") if with_bias else None
        self.layout, self.shape = Layout.of(modules[0]), self.weight.shape
        #: Which of the optimizer's parameter groups hold them.
        self.groups: tuple[int, ...] = ()
        #: Whether forward passes are counted now, and whether there has been one at all.
        self.armed, self.called = True, False
        #: Steps of the optimizer, and measurements without a row while it had gradients.
        self.step_index = self.missed = 0
        #: How often its covariance could not be factorised, and rows were dropped for sums with NaN or inf.
        self.failures = self.spoiled = 0
        #: The scale that its weight was last stepped in, of a chart that holds the scaled weights; 0 is none.
        self.held_scale = 0.0
        #: Changes whenever arrived sums are dropped: a call counts once in each.
        self.window = 0
        self.covariance = make(modules[0], with_bias)
        #: Its factors by the chart; None before the first measurement.
        self.factors: list[Any] | None = None
        self.forget()
        self._register()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "remove_hooks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        for module in self.modules:
            for key, old in list(module._forward_hooks.items()):
                if isinstance(old, InputHook) and old.layer() is None:  # came with a copy of the model
                    module._forward_hooks.pop(key)
                    module._forward_hooks_with_kwargs.pop(key, None)
        # After the call, which may fail, and whose input other hooks may change.
        hooks = ExitStack()
        for place, module in enumerate(self.modules):
            hooks.callback(module.register_forward_hook(InputHook(self, place), with_kwargs=True).remove)
        #: Takes the hooks off the model; so does the end of this object.
        self.remove_hooks = weakref.finalize(self, hooks.close)

    def forget(self) -> None:
        """Drop the rows that are to count at the next measurement."""
        #: Sums over calls that gradients have come to, never changed in place; and how many rows they are of.
        self.pending: Sums | None = None
        self.pending_rows = 0
        #: The same of calls that no backward pass is seen of.
        self.unwatched: tuple[Sums, int] | None = None
        self.drop()

    def drop(self) -> None:
        """Drop the rows whose gradients are cleared now."""
        self.window += 1
        self.pending, self.pending_rows = None, 0
        #: The backward pass that writes the weight's .grad and has brought some of them last.
        self.last_pass: int | None = None

    def settle(self) -> None:
        """Join all that counts at this step; nothing where the gradient has been cleared."""
        if self.weight.grad is None:
            self.forget()
        elif self.unwatched is not None:
            self._join(*self.unwatched)
            self.unwatched = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Weight and bias, if that is treated with it."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def finite(self) -> Tensor:
        """Whether the sums since the last measurement hold neither NaN nor inf."""
        return torch.stack([block.sum() for block in self.pending or ()]).isfinite().all()

    @torch.compiler.disable
    def add(self, module: nn.Module, input: Tensor, output: Any, bias_entry: int = 1) -> None:
        """Count the rows of one call, once a gradient comes back to it.

        Args:
            module: the layer that reads.
            input: of this call.
            output: of this call; None where it is not known, and the rows count at once.
            bias_entry: the entry of rows in the place of the bias: 1, or 0 of rows of derivatives.
        """
        # functional_call and fully_shard put other weights in its place, to_empty() one with memory; the step tells.
        present = module._parameters.get("weight")
        weight = self.weight if present is None else present
        if isinstance(input, FakeTensor) or self.weight.is_meta != input.is_meta or weight.shape != self.shape:
            return
        is_watched = output is not None and not is_within_transform()
        with DisableTorchFunctionSubclass():
            nodes = nodes_of(output) if is_watched and weight.requires_grad else ()
            if is_watched and not nodes:
                return
            node = node_of(weight) if nodes else None
            with torch.no_grad(), outside_transforms():
                rows = plain_tensor(local(rows_within(self.name, module, plain_tensor(input))))
                sums, count = self._sum(module, rows, bias_entry)
                if nodes:
                    call = Call(self, sums, count, node, weight is self.weight)
                    for each in nodes:
                        each.register_prehook(call)
                else:
                    before, number = self.unwatched or (None, 0)
                    self.unwatched = added(before, sums), number + count

    def _sum(self, module: nn.Module, rows: Tensor, bias_entry: int) -> tuple[Sums, int]:
        sums, count, dtype = Sums(), 0, _device.wide_dtype(self.weight)  # the model may have been converted
        with without_autocast(rows.device.type):
            for part, number in self.covariance.sums(patches_of(module, rows), dtype, bias_entry, self.step_index):
                part = [tensor.to(self.weight.device) for tensor in part]  # which fully_shard may offload
                count += number
                sums = [total.add_(more) for total, more in zip(part, sums, strict=True)] if sums else part
        return sums, count

    def arrive(self, call: Call, number: int | None) -> None:
        """Count a call that a gradient has come to, but once in a window.

        `number` is the backward pass, if it writes the weight's .grad; None of any other.
        """
        if number is not None:
            if self.last_pass not in (None, number) and self.weight.grad is None:
                self.drop()  # others have cleared it since
            self.last_pass = number
        # Products with eigenvectors of before could not be added to those with the present ones.
        fits = not self.covariance.depends_on_memory or call.covariance is self.covariance
        if self.armed and call.window != self.window and fits:
            self._join(call.sums, call.rows)
        call.window = self.window

    def _join(self, sums: Sums, rows: int) -> None:
        if rows:
            self.pending, self.pending_rows = added(self.pending, sums), self.pending_rows + rows

    def has_gradient(self) -> bool:
        """Whether its weight has a gradient that is not 0; waits for the device."""
        gradient = self.weight.grad
        if gradient is None:
            return False
        rows = local(gradient)
        return not rows.numel() or any(_device.read(rows.any()))  # a process without rows cannot tell
