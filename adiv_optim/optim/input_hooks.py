"""What layers read, counted in forward passes without keeping activations.

In a graph of torch.compile one operation counts, which the compiler does not look into. Within transforms of torch.func
the rows are those of the primal tensor, once: tangents add none, and what vmap maps over is one more dimension of rows.
"""

import itertools
import weakref
from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, library, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import has_side_effect
from torch.nn.utils import parametrize
from torch.utils.weak import WeakTensorKeyDictionary

from .._linalg import host
from .._linalg.shards import local
from ..attach.layers import Layout
from ..attach.rows import patches_of, reads_patches, rows_within
from ..functional.shared import refuse_capture, without_autocast
from .second_moments import Moments

#: Of every tensor that layers have read, the last sums of each kind, and before them what else they follow from: its
#: version, the layer's sums without it, and its memory. Layers that read the same have one list of sums, this one.
_readings: MutableMapping[Tensor, dict[Any, tuple[Any, ...]]] = WeakTensorKeyDictionary()


class LayerInputs:
    """Sums over what a layer reads, and their running mean; one for each weight: modules that share one add up.

    Args:
        name: the weight's name, for messages and checkpoints.
        modules: layers whose rows are known, all with the same weight, and the same bias if `with_bias`.
        with_bias: whether the bias is treated with the weight.
        moments: which sums.
    """

    def __init__(self, name: str, modules: list[nn.Module], with_bias: bool, moments: Moments) -> None:
        self.name, self.modules, self.with_bias = name, modules, with_bias
        self.moments, self.layout = moments, Layout.of(modules[0])
        #: What the optimizer holds: between a forward and its backward the modules of fully_shard hold others.
        self.weight: nn.Parameter = modules[0].get_parameter("weight")
        self.bias: nn.Parameter | None = modules[0].get_parameter("bias") if with_bias else None
        #: Which of the optimizer's parameter groups hold them.
        self.groups: tuple[int, ...] = ()
        #: Whether forward passes are counted now, and whether there has been one at all.
        self.armed, self.called = True, False
        #: Steps of the optimizer, and measurements without a row while it had gradients.
        self.turn = self.missed = 0
        #: Sums with the factor decay^age, zeros at first, and how many rows they are of, counted likewise.
        self.memory, self.rows = moments.zeros(self.weight), 0.0
        self.forget_pending()
        self._register()

    def forget_pending(self) -> None:
        """Drop what forward passes have left since the last measurement."""
        #: Never changed in place: layers that have read the same share it.
        self.pending: list[Tensor] | None = None
        self.pending_rows = 0
        #: Whether zero_grad was called since: the next forward pass then begins anew, unless gradients have come.
        self.dropped = False

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

    def remembers_as(self, other: "LayerInputs") -> bool:
        """Whether another layer's memory is equal, as of those that have shared it before a checkpoint was saved."""
        alike = self.moments.key == other.moments.key and self.rows == other.rows
        places = [(m.device, m.dtype) for m in (*self.memory, *other.memory)]
        return alike and len(set(places)) == 1 and all(map(torch.equal, self.memory, other.memory))

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

    @property
    def present_name(self) -> str:
        """The weight's name in the model now: pruning calls it weight_orig."""
        own = (name for name, parameter in self.modules[0]._parameters.items() if parameter is self.weight)
        return self.name.removesuffix("weight") + next(own, "weight")

    def absorb(self, decay: float) -> None:
        """Let what it has seen since the last measurement into the average; a NoRootError of its moments' ends that."""
        self.memory = self.moments.updated(self.memory, self.pending or [], decay)
        self.rows = decay * self.rows + self.pending_rows

    def finite(self) -> Tensor:
        """Whether the sums since the last measurement hold neither NaN nor inf."""
        return torch.stack([block.sum() for block in self.pending or ()]).isfinite().all()

    @torch.compiler.disable
    @torch.no_grad()
    def add(self, module: nn.Module, input: Tensor, one: int = 1, shared: bool = False) -> None:
        """Count the rows of one forward pass, whatever transforms are around it.

        Args:
            module: the layer that reads.
            input: what it reads.
            one: what rows have in the place of the bias: 1, or 0 of rows of derivatives.
            shared: whether other layers may read this very tensor: not in a compiled graph, which puts other numbers
                into a tensor's memory when it has no more use for it.
        """
        if isinstance(input, FakeTensor):
            return
        with outside_transforms():
            rows = local(rows_within(self.name, module, input))
            if self.dropped and not self.has_gradient():
                self.forget_pending()
            if not shared or reads_patches(module) or rows.is_inference():
                self._sum(module, rows, one)
                return
            made = _readings.setdefault(rows, {})
            kind = self.moments.key, self.weight.dtype, self.weight.device
            before, past = self.pending, self.memory if self.rows else None
            found = made.get(kind, (None,) * 5)
            if found[0] == rows._version and found[1] is before and found[2] is past:
                self.pending, self.pending_rows = found[3:]
                return
            self._sum(module, rows, one)
            made[kind] = rows._version, before, past, self.pending, self.pending_rows

    def _sum(self, module: nn.Module, rows: Tensor, one: int) -> None:
        sums: list[Tensor] | None = None
        memory = [tensor.to(host.wide(self.weight)) for tensor in self.memory]  # the model may have been converted
        with without_autocast(rows.device.type):
            for part, count in self.moments.sums(patches_of(module, rows), memory, one, self.turn):
                part = [tensor.to(self.weight.device) for tensor in part]  # which fully_shard may offload
                self.pending_rows += count
                sums = part if sums is None else [total.add_(more) for total, more in zip(sums, part, strict=True)]
        if sums is not None and self.pending is not None:
            sums = [total.add_(before) for total, before in zip(sums, self.pending, strict=True)]
        self.pending = sums if sums is not None else self.pending

    def has_gradient(self) -> bool:
        """Whether its weight has a gradient that is not 0; waits for the device."""
        gradient = self.weight.grad
        if gradient is None:
            return False
        rows = local(gradient)
        return not rows.numel() or any(host.read(rows.any()))  # a process without rows cannot tell


class InputHook:
    """A forward hook that belongs to a `LayerInputs` and does nothing without it.

    A copy or a pickle of the model alone (an average of weights, a target network) does not copy it.
    """

    def __init__(self, layer: LayerInputs, place: int) -> None:
        self.layer, self.place = weakref.ref(layer), place
        # Names the hook in graphs. A tensor, not a number: the graph stays the same for another one, and the operation
        # says that it writes to it, so that no compiler drops or reorders it.
        key = next(_keys)
        _hooks[key] = self
        self.token = torch.tensor([key], device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        return {"layer": _gone}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        layer = self.layer()
        # Not module.training: fine-tuning under eval() is usual.
        if layer is None or not torch.is_grad_enabled() or torch.compiler.is_exporting() or torch.jit.is_tracing():
            return
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                f"{layer.name!r} is called by nn.DataParallel on a copy of the layer, in a thread of its own, whose "
                "rows the optimizer cannot add up. Use DistributedDataParallel, by torchrun; or one device."
            )
        # By whatever name: nn.Linear calls it input, transformers' Conv1D x.
        input = args[0] if args else next(iter(kwargs.values()))
        if torch.compiler.is_dynamo_compiling() and type(input) in (Tensor, nn.Parameter):
            # Both are guarded on: between measurements there is another graph, without any of this.
            if layer.armed or not layer.called:
                count_in_graph(self.token, input)
        else:
            self.count(input, shared=True)

    def count(self, input: Tensor, shared: bool) -> None:
        """Count the rows of one call; for `shared` see `LayerInputs.add`."""
        layer = self.layer()
        # A backward does not come through inference mode, though gradients may be enabled in it.
        if layer is None or torch.is_inference_mode_enabled():
            return
        refuse_capture(layer.name, "remembers its inputs", input)
        layer.called = True
        if layer.armed:
            layer.add(layer.modules[self.place], input, shared=shared)


_keys = itertools.count()
_hooks: weakref.WeakValueDictionary[int, InputHook] = weakref.WeakValueDictionary()


def _gone() -> None:
    """Called, it returns None, as a weak reference to something gone does; and torch.compile traces it."""


@has_side_effect
@torch.compiler.allow_in_graph
def count_in_graph(token: Tensor, input: Tensor) -> None:
    """Count what a layer reads, in a graph."""
    # Of a backend that runs what it is given as it is, which is no fake tensor; checkpoints keep the token.
    _count_rows(token.clone() if type(token) is Tensor else token, input.detach())


@library.custom_op(
    "adiv_optim::count_rows",
    mutates_args=("token",),
    schema="(Tensor(a0!) token, Tensor input) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),  # the replay of a CUDA graph would not count
)
def _count_rows(token: Tensor, input: Tensor) -> None:
    hook = _hooks.get(int(token))
    if hook is not None:
        hook.count(input, shared=False)


@_count_rows.register_fake
def _(token: Tensor, input: Tensor) -> None:
    return None
