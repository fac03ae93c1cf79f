"""What layers read, counted in forward passes without keeping activations, once a backward pass has come by.

In a graph of torch.compile one operation counts, which the compiler does not look into. Within transforms of torch.func
the rows are those of the primal tensor, once: tangents add none, and what vmap maps over is one more dimension of rows.
Of neither is a backward pass seen: their rows count at once, and zero_grad() drops them if no gradient comes after it.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._linalg import host
from .._linalg.shards import local
from .._torch import DisableTorchFunctionSubclass, FakeTensor, is_within_transform, outside_transforms, plain_tensor
from ..attach.coverage import warn
from ..attach.layers import Layout
from ..attach.rows import patches_of, reads_patches, rows_within
from ..functional.patches import Patches
from ..functional.shared import without_autocast
from .arrivals import Call, InputHook, Reading, may_serve, node_of, nodes_of, readings_of, version_of, weight_of
from .covariance import MeanSquare, Sums

#: A measurement is warned of that takes longer than so many multiplications, some half a second of one core, and longer
#: than so many forward passes of its layer.
LONG, FORWARD_PASSES = 2**33, 20


class LayerInputs:
    """Sums over what a layer reads, and their running mean; one for each weight: modules that share one add up.

    Args:
        name: the weight's name, for messages and checkpoints.
        modules: layers whose rows are known, all with the same weight, and the same bias if `with_bias`.
        with_bias: whether the bias is treated with the weight.
        make: (layer, with_bias) → what is remembered of its inputs, before the first row.
    """

    def __init__(
        self, name: str, modules: list[nn.Module], with_bias: bool, make: Callable[[nn.Module, bool], MeanSquare]
    ) -> None:
        self.name, self.modules, self.with_bias, self.make = name, modules, with_bias, make
        #: What the optimizer holds: between a forward and its backward the modules of fully_shard hold others.
        self.weight: nn.Parameter = modules[0].get_parameter("weight")
        self.bias: nn.Parameter | None = modules[0].get_parameter("bias") if with_bias else None
        #: Which of the optimizer's parameter groups hold them.
        self.groups: tuple[int, ...] = ()
        #: Whether forward passes are counted now, and whether there has been one at all.
        self.armed, self.called = True, False
        #: Whether the price of a measurement has been looked at.
        self.is_priced = False
        #: Steps of the optimizer, and measurements without a row while it had gradients.
        self.step_index = self.missed = 0
        #: How often its covariance could not be factorised, and rows were dropped for sums with NaN or inf.
        self.failures = self.spoiled = 0
        #: The scale that its weight was last stepped in, of a chart that holds the scaled weights; 0 is none.
        self.held_scale = 0.0
        #: Changes whenever what has arrived is forgotten: a call counts once in each.
        self.window = 0
        self._begin()
        #: The shape that the weight had before, until the watch has taken note of it.
        self.old_shape: torch.Size | None = None
        self._register()

    def _begin(self) -> None:
        self.layout, self.shape = Layout.of(self.modules[0]), self.weight.shape
        self.covariance = self.make(self.modules[0], self.with_bias)
        #: What follows from it, as the chart says; None before the first measurement.
        self.factors: list[Any] | None = None
        self.forget()

    def begin_anew(self) -> bool:
        """If the weight has another shape than before, as of a pruned layer, forget all; say whether it has."""
        if self.weight.shape == self.shape:
            return False
        self.old_shape = self.old_shape or self.shape
        self._begin()
        return True

    def forget(self) -> None:
        """Drop the rows that are to count at the next measurement."""
        #: Sums over calls that gradients have come to. Never changed in place: layers that read the same share it.
        self.pending: Sums | None = None
        self.pending_rows = 0
        self.window += 1
        #: The backward pass that writes the weight's .grad and has brought some of them last.
        self.last_pass: int | None = None
        self.forget_unwatched()

    def forget_unwatched(self) -> None:
        """Drop the rows that count whether a gradient has come to them or not."""
        self.unwatched: Reading | None = None
        #: Whether zero_grad was called since: they count if the weight has a gradient at the next such row, or step.
        self.dropped = False

    def drop(self) -> None:
        """Drop the rows whose gradients are cleared now."""
        self.window += 1
        if self.pending is not None or self.unwatched is not None:
            unwatched = self.unwatched
            self.forget()
            self.unwatched, self.dropped = unwatched, unwatched is not None

    def settle(self) -> None:
        """Join all that counts at this step."""
        if self.weight.grad is None or (self.dropped and not self.has_gradient()):
            self.forget_unwatched()
        if self.weight.grad is None and self.pending is not None:  # cleared by others
            self.forget()
        if self.unwatched is not None:
            self._join(self.unwatched)
            self.forget_unwatched()

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

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Weight and bias, if that is treated with it."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def moves(self) -> bool:
        """Whether the layer multiplies by the weight itself, and all its parameters have gradients."""
        return not self.is_computed and all(p.grad is not None for p in self.parameters)

    @property
    def is_computed(self) -> bool:
        """Whether a parametrization has come since, which makes the weight of others."""
        return any(parametrize.is_parametrized(module, "weight") for module in self.modules)

    def finite(self) -> Tensor:
        """Whether the sums since the last measurement hold neither NaN nor inf."""
        return torch.stack([block.sum() for block in self.pending or ()]).isfinite().all()

    @torch.compiler.disable
    def add(self, module: nn.Module, input: Tensor, output: Any, bias_entry: int = 1) -> None:
        """Count the rows of one call, once a gradient comes back to it.

        Args:
            module: the layer that reads.
            input: what it reads.
            output: what it has made of that; None where that is not known, and the rows count at once.
            bias_entry: what rows have in the place of the bias: 1, or 0 of rows of derivatives.
        """
        # to_empty() has put another weight in the place of one without memory; the step tells.
        if isinstance(input, FakeTensor) or self.weight.is_meta != input.is_meta:
            return
        watched, weight = output is not None and not is_within_transform(), weight_of(module, self.weight)
        if weight.shape != self.weight.shape:
            return  # another one, which the optimizer does not hold
        with DisableTorchFunctionSubclass():
            if watched:
                nodes, weight_node = nodes_of(output), node_of(weight)
                if not nodes or not weight.requires_grad:
                    return
            self.begin_anew()
            with torch.no_grad(), outside_transforms():
                rows = plain_tensor(local(rows_within(self.name, module, plain_tensor(input))))
                if watched:
                    call = Call(self, self._reading(module, rows, bias_entry), weight_node, weight is self.weight)
                    for node in nodes:
                        node.register_prehook(call)
                    return
                # Nor is the tensor asked for: a compiled graph puts other numbers into memory of no more use to it.
                if self.dropped and not self.has_gradient():
                    self.forget_unwatched()
                self.unwatched = self._sum(module, rows, bias_entry, self.unwatched)

    @property
    def _remembered(self) -> MeanSquare | None:
        return self.covariance if self.covariance.rows else None

    def _reading(self, module: nn.Module, rows: Tensor, bias_entry: int) -> Reading:
        if reads_patches(module):
            return self._sum(module, rows, bias_entry)
        kind, readings = (self.covariance.key, self.weight.dtype, self.weight.device), readings_of(rows)
        reading = readings[kind]() if kind in readings else None
        if reading is None or not may_serve(reading, rows, self, self._remembered):
            reading = self._sum(module, rows, bias_entry)
            readings[kind] = weakref.ref(reading)
        reading.readers.add(id(self))
        return reading

    def _sum(self, module: nn.Module, rows: Tensor, bias_entry: int, before: Reading | None = None) -> Reading:
        sums, count = (before.sums, before.rows) if before is not None else ([], 0)
        dtype = host.wide(self.weight)  # the model may have been converted
        with without_autocast(rows.device.type):
            patches = patches_of(module, rows)
            if not self.is_priced:
                self._tell_price(patches)
            for part, number in self.covariance.sums(patches, dtype, bias_entry, self.step_index):
                part = [tensor.to(self.weight.device) for tensor in part]  # which fully_shard may offload
                count += number
                sums = [total.add_(more) for total, more in zip(part, sums, strict=True)] if sums else part
        return Reading(sums, count, self._remembered, version_of(rows))

    def _tell_price(self, patches: Patches) -> None:
        """Warn, once for a layer, of a measurement that takes long, and much longer than the layer itself."""
        self.is_priced = True
        # Of a linear layer the positions are the rows: a kernel without dimensions has one.
        forward = self.weight.numel() * len(patches.input) * patches.positions
        work = self.covariance.work(patches)
        if work > LONG and work > FORWARD_PASSES * forward:
            warn(
                f"{self.name}: a measurement of what its layer reads takes some {work / max(1, forward):.0f} times the "
                "multiplications of a forward pass of the layer. A rank of 16 or less, or a smaller max_dim or "
                "max_rows, makes it cheaper, and a greater `every` rarer; skip leaves the layer alone."
            )

    def arrive(self, reading: Reading, window: int, number: int | None) -> int:
        """Count a call that a gradient has come to, but once in a window.

        Args:
            reading: what it has read.
            window: the one that it was counted in last.
            number: the backward pass, if it writes the weight's .grad; None of any other.

        Returns:
            The present window.
        """
        if number is not None:
            if self.last_pass not in (None, number) and self.weight.grad is None:
                self.drop()  # others have cleared it since
            self.last_pass = number
        fits = not self.covariance.depends_on_memory or reading.covariance is self._remembered
        if self.armed and window != self.window and fits:
            self._join(reading)
        return self.window

    def _join(self, reading: Reading) -> None:
        if reading.rows:
            self.pending = reading.added_to(self.pending, self._remembered)
            self.pending_rows += reading.rows

    def has_gradient(self) -> bool:
        """Whether its weight has a gradient that is not 0; waits for the device."""
        gradient = self.weight.grad
        if gradient is None:
            return False
        rows = local(gradient)
        return not rows.numel() or any(host.read(rows.any()))  # a process without rows cannot tell
