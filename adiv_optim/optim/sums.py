"""Running sums over the inputs of a layer, gathered in the forward pass without keeping activations."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize

from .._linalg import host
from .._linalg.shards import Cut, cut_of, local
from ..functional.shared import refuse_capture, without_autocast
from .checkpoint import NUMBER, POSITIVE, Maybe, check, numbers
from .counting import Traced, count, countable, outside_transforms, rows_within, token_of


class InputSums(ABC):
    """Sums over what a layer reads, and their running average.

    One object for each weight: modules that share one add up.

    Args:
        name: the weight's name, for messages and checkpoints.
        modules: layers whose rows are known, all with the same weight, and the same bias if `with_bias`.
        with_bias: whether the bias is treated with the weight.
    """

    def __init__(self, name: str, modules: list[nn.Module], with_bias: bool) -> None:
        self.name, self.modules, self.with_bias = name, modules, with_bias
        #: What the optimizer holds: between a forward and its backward the modules of fully_shard hold others.
        self.weight: nn.Parameter = modules[0].get_parameter("weight")
        self.bias: nn.Parameter | None = modules[0].get_parameter("bias") if with_bias else None
        #: Whether forward passes are counted now, and whether there has been one at all.
        self.armed, self.called = True, False
        #: Steps that have been taken since, and by the optimizer; a checkpoint has the latter.
        self.steps = self.turn = 0
        self.reset()
        self._register()

    @property
    @abstractmethod
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the sums. Of a weight that is cut by columns the last sum is over all columns."""

    @abstractmethod
    def sums(self, module: nn.Module, input: Tensor, one: int = 1) -> Iterator[tuple[list[Tensor], int]]:
        """Yield sums of these shapes over parts of one input, each with the number of rows in it.

        `one` is what rows have in the place of the bias: 1, or 0 of rows of derivatives.
        """

    def reset(self) -> None:
        """Forget everything."""
        self.forget_pending()
        #: Sums with the weights decay^age, and the sum of the weights.
        self.total: list[Tensor] | None = None
        self.rows = 0.0
        #: Measurements in a row, while it had gradients, that found no rows.
        self.unseen = 0

    def forget_pending(self) -> None:
        """Drop what forward passes have left since the last measurement."""
        self.pending: list[Tensor] | None = None
        self.pending_rows = 0
        #: Whether zero_grad was called since: the next forward pass then begins anew, unless gradients have come.
        self.dropped = False

    def drop(self) -> None:
        """Drop what zero_grad has dropped."""
        self.forget_pending()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "remove_hooks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        for module in self.modules:
            for key, old in list(module._forward_hooks.items()):
                if isinstance(old, _Hook) and old.sums() is None:  # came with a copy of the model
                    module._forward_hooks.pop(key)
                    module._forward_hooks_with_kwargs.pop(key, None)
        # After the call, which may fail, and whose input other hooks may change.
        handles = [
            module.register_forward_hook(_Hook(self, place), with_kwargs=True)
            for place, module in enumerate(self.modules)
        ]
        #: Takes the hooks off the model; so does the end of this object.
        self.remove_hooks = weakref.finalize(self, _remove_all, handles)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Weight and bias, if x~ has a 1."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def parametrized(self) -> bool:
        """Whether the layer multiplies by a function of the weight since."""
        return any(parametrize.is_parametrized(module, "weight") for module in self.modules)

    @property
    def present_name(self) -> str:
        """The weight's name in the model now: pruning calls it weight_orig."""
        own = (name for name, parameter in self.modules[0]._parameters.items() if parameter is self.weight)
        return self.name.removesuffix("weight") + next(own, "weight")

    @property
    def cut(self) -> Cut | None:
        """The cut of a weight that is sharded by columns: this process then reads a part of every row."""
        cut = cut_of(self.weight)
        return cut if cut is not None and cut.dim else None

    @property
    def groups(self) -> int:
        """The groups of a convolution; 1 for other layers."""
        return int(getattr(self.modules[0], "groups", 1))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the sums and of all that is made of them."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def no_rows(self) -> list[Tensor]:
        """Zeros, which a process adds whose batch did not reach the layer."""
        return [torch.zeros(shape, dtype=self.dtype, device=self.weight.device) for shape in self.shapes]

    @torch.compiler.disable
    @torch.no_grad()
    def add(self, module: nn.Module, input: Tensor, readers: Traced | None = None, one: int = 1) -> None:
        """Count the rows of one forward pass, whatever transforms are around it.

        For `readers` see `follows`, for `one` see `sums`: where it is 0, rows are counted by hand.
        """
        if isinstance(input, FakeTensor):
            return
        with outside_transforms():
            self._add(module, rows_within(self.name, module, input), readers, one)

    def _add(self, module: nn.Module, input: Tensor, readers: Traced | None, one: int) -> None:
        held = self._held(input)
        if self.dropped and not self.has_gradient():
            self.drop()
        if self.follows(input if one else None, readers):
            return
        with without_autocast(held.device.type):
            for sums, rows in self.sums(module, held, one):
                sums = [part.to(self.weight.device) for part in sums]  # which fully_shard may offload
                self.pending_rows += rows
                if self.pending is not None:
                    sums = [total.add_(part) for total, part in zip(self.pending, sums, strict=True)]
                self.pending = sums

    @property
    def seen(self) -> bool:
        """Whether anything has been counted since the last measurement."""
        return self.pending is not None

    def follows(self, input: Tensor | None, readers: Traced | None = None) -> bool:
        """Whether another layer has counted these very rows, so that they need no sums of their own.

        By `readers`, or the layer's own if there are none. Rows that are counted by hand, None, are this layer's alone.
        """
        return False

    def _held(self, input: Tensor) -> Tensor:
        """The rows as this process holds them: whole, or some of their columns where the weight is cut by columns."""
        placements = getattr(input, "placements", ())
        for placement in placements:
            by_columns = placement.is_shard() and placement.dim % input.dim() == input.dim() - 1
            if not (by_columns if self.cut else placement.is_replicate()):
                raise ValueError(
                    f"{self.name!r} is sharded as {getattr(self.weight, 'placements', 'a whole')} and reads an input "
                    f"that is sharded as {placements}, of which this process has other rows or columns than the "
                    "weight; use the layouts of ColwiseParallel and RowwiseParallel, or name this layer in skip."
                )
        return local(input)

    def has_gradient(self) -> bool:
        """Whether its weight has a gradient that is not 0; waits for the device."""
        gradient = self.weight.grad
        if gradient is None:
            return False
        rows = local(gradient)
        return not rows.numel() or any(host.read(rows.any()))  # a process without rows cannot tell

    def finite(self) -> Tensor:
        """Whether the sums since the last measurement hold neither NaN nor inf."""
        return torch.stack([block.sum() for block in self.pending or ()]).isfinite().all()

    def absorb(self, decay: float) -> None:
        """Add the sums since the last measurement to the average."""
        pending, rows = self.pending or [], self.pending_rows
        self.forget_pending()
        if self.total is not None and decay:
            # Made anew, not in place: a checkpoint may hold the old ones.
            pending = [block.add(old.to(block), alpha=decay) for block, old in zip(pending, self.total, strict=True)]
            self.rows *= decay
        else:
            self.rows = 0.0
        self.total = pending
        self.rows += rows

    def state_dict(self) -> dict[str, Any]:
        """Return the memory."""
        return {"total": self.total, "rows": self.rows}

    def filled(self) -> dict[str, Any]:
        """Return the memory in the same shapes whether anything has been seen or not."""
        return {**self.state_dict(), "total": self.no_rows() if self.total is None else self.total}

    def emptied(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `state_dict` that was `filled`."""
        return {**state, "total": state["total"] if state["rows"] else None}

    def wanted(self) -> dict[str, Any]:
        """What `state_dict` holds, for `checkpoint.check`."""
        return {"total": Maybe([numbers(shape) for shape in self.shapes]), "rows": NUMBER}

    def check_state_dict(self, state: Any, path: str, remedy: str) -> None:
        """Raise a ValueError if the memory is of a layer of another size, or damaged; see `checkpoint.check`."""
        check(state, self.wanted(), path, remedy)
        if state["total"] is not None:
            check(state["rows"], POSITIVE, f"{path}['rows']", remedy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the memory from a checkpoint."""
        self.reset()
        total = state["total"]
        self.total = total and [block.to(self.weight.device, self.dtype) for block in total]
        self.rows = state["rows"]


class _Hook:
    """A forward hook that belongs to sums and does nothing without them.

    A copy or a pickle of the model alone (an average of weights, a target network) does not copy them.
    """

    def __init__(self, sums: InputSums, place: int) -> None:
        self.sums, self.place, self.token = weakref.ref(sums), place, token_of(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"sums": _gone}

    @property
    def __name__(self) -> str:
        # torch.jit.script asks every hook for its name before it compiles it.
        if self.sums() is None:
            raise AttributeError(
                "a hook that came with this copy of a model cannot be scripted: load its state_dict() into a new "
                "model, or detach() the optimizer before the model is copied"
            )
        raise AttributeError(
            "an optimizer gathers what this layer reads by a hook, which cannot be scripted: detach() it"
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        sums = self.sums()
        # Not module.training: fine-tuning under eval() is usual.
        if sums is None or not torch.is_grad_enabled() or torch.compiler.is_exporting() or torch.jit.is_tracing():
            return
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                f"{sums.name!r} is called by nn.DataParallel on a copy of the layer, in a thread of its own, whose "
                "rows the optimizer cannot add up. Use DistributedDataParallel, by torchrun; or one device."
            )
        # By whatever name: nn.Linear calls it input, transformers' Conv1D x.
        input = args[0] if args else next(iter(kwargs.values()))
        if countable(input):
            # Both are guarded on: between measurements there is another graph, without any of this.
            if sums.armed or not sums.called:
                count(self.token, input)
        else:
            self.count(input)

    def count(self, input: Tensor, readers: Traced | None = None) -> None:
        """Count the rows of one call, with what is known of the graph that it is part of, if it is."""
        sums = self.sums()
        # A backward does not come through inference mode, though gradients may be enabled in it.
        if sums is None or torch.is_inference_mode_enabled():
            return
        refuse_capture(sums.name, "remembers its inputs", input)
        sums.called = True
        if sums.armed:
            sums.add(sums.modules[self.place], input, readers)


def _gone() -> None:
    """Called, it returns None, as a weak reference to something gone does; and torch.compile traces it."""


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
