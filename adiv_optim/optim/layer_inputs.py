"""Sums over the inputs of layers: hooks take them in forward passes, and they count once a gradient comes back.

Until then the sums wait in the graph, and go with it. Within transforms of torch.func the rows are those of the primal
tensor, once: tangents add none, and a vmapped dimension counts as rows. Of neither these nor graphs of torch.compile a
backward pass is seen: their rows count at once, if the weight has a gradient at the step.
"""

import weakref
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.conv import _ConvNd

from .. import _device, _torch
from .._device import local, refuse_capture, without_autocast
from ..functional.patches import patches_of
from ..rows.layers import Layout
from ..rows.models import first_argument
from .compiled import count_in_graph, new_token
from .covariance import MeanSquare, Sums


class LayerInputs:
    """Sums over the inputs of a layer, and their running mean; one for each weight: modules that share one add up.

    Args:
        name: the weight's name, for messages and checkpoints.
        modules: layers whose rows are known, all with the same weight, and if `with_bias` the same treated bias.
        covariance: of its inputs, before the first row.
    """

    def __init__(self, name: str, modules: list[nn.Module], with_bias: bool, covariance: MeanSquare) -> None:
        self.name, self.modules, self.covariance = name, modules, covariance
        #: The optimizer's parameters: between a forward and its backward the modules of fully_shard hold others.
        self.weight: nn.Parameter = modules[0].get_parameter("weight")
        self.bias: nn.Parameter | None = modules[0].get_parameter("bias") if with_bias else None
        self.layout, self.shape = Layout.of(modules[0]), self.weight.shape
        #: Which of the optimizer's parameter groups hold them.
        self.groups: tuple[int, ...] = ()
        #: Whether forward passes are counted now, and whether there has been one at all.
        self.armed, self.called = True, False
        #: Measurements in succession without a row while it had gradients.
        self.empty_measurements = 0
        #: How often its covariance could not be factorised, and rows were dropped for sums with NaN or inf.
        self.failures = self.drops = 0
        #: The scale that its weight was last stepped in, of a change of variables that holds W'; 0 is none.
        self.last_scale = 0.0
        #: How often arrived sums were dropped: between two times a call counts once.
        self.clear_count = 0
        #: R, block by block; None before the first measurement.
        self.factors: list[Any] | None = None
        self.drop_all()
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

    def drop_all(self) -> None:
        """Drop the rows that are to count at the next measurement."""
        #: Sums over calls that no backward pass is seen of, never changed in place.
        self.sums_without_backward: Sums | None = None
        self.drop_arrived()

    def drop_arrived(self) -> None:
        """Drop the rows whose gradients are cleared now."""
        self.clear_count += 1
        #: Sums over calls that gradients have come to, likewise.
        self.arrived: Sums | None = None
        #: The backward pass that writes the weight's .grad and has brought some of them last.
        self.last_backward: int | None = None

    def counted(self) -> Sums | None:
        """Return the sums that count at this step; None where there are none, or the gradient has been cleared."""
        if self.weight.grad is None:
            return None
        return self.sums_without_backward.plus(self.arrived) if self.sums_without_backward else self.arrived

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Weight and bias, if that is treated with it."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @torch.compiler.disable
    def add(self, module: nn.Module, input: Tensor, output: Any, bias_entry: int = 1) -> None:
        """Count the rows of one call, once a gradient comes back to its output; at once where that is None, not known.

        `bias_entry` is what stands in the place of the bias: 1, or 0 of rows of derivatives.
        """
        if not isinstance(input, Tensor):
            raise TypeError(f"{self.name} reads a {type(input).__name__}, no tensor; name its layer in skip.")
        # functional_call and fully_shard put other weights in its place, to_empty() one with memory; the step checks.
        present = module._parameters.get("weight")
        weight = self.weight if present is None else present
        is_frozen = not self.weight.requires_grad  # for a while
        is_elsewhere = isinstance(input, _torch.FakeTensor) or self.weight.is_meta != input.is_meta
        if is_frozen or is_elsewhere or weight.shape != self.shape:
            return
        is_watched = output is not None and not _torch.is_within_transform()
        with _torch.DisableTorchFunctionSubclass():
            nodes = nodes_of(output, input) if is_watched and weight.requires_grad else ()
            if is_watched and not nodes:
                return
            node = node_of(weight) if nodes else None
            with torch.no_grad(), _torch.outside_transforms():
                rows = _torch.plain_tensor(local(unwrapped_input(self.name, module, _torch.plain_tensor(input))))
                sums = self._sum(module, rows, bias_entry)
                if nodes and sums is not None:
                    waiting = WaitingSums(self, sums, node, weight is self.weight)
                    for each in nodes:
                        each.register_prehook(waiting)
                elif sums is not None:
                    self.sums_without_backward = sums.plus(self.sums_without_backward)

    def _sum(self, module: nn.Module, rows: Tensor, bias_entry: int) -> Sums | None:
        """Return the sums over the rows of one call, or None where it has none."""
        total, dtype = None, _device.wide_dtype(self.weight)  # the model may have been converted
        with without_autocast(rows.device.type):
            patches = patches_of(module, rows)
            wanted = self.covariance.features * self.covariance.groups // torch.Size(patches.kernel).numel()
            if (read := patches.input.shape[1]) != wanted:
                raise ValueError(f"{self.name}: its input has {read} features or channels; its weight takes {wanted}.")
            for sums in self.covariance.sums(patches, dtype, bias_entry):
                parts = [part.to(self.weight.device) for part in sums.parts]  # which fully_shard may offload
                total = Sums(parts, sums.rows).plus(total)
        return total if total is not None and total.rows else None

    def arrive(self, waiting: "WaitingSums", number: int | None) -> None:
        """Count a call that a gradient has come to, but once between two clearings of gradients.

        `number` is the backward pass, if it writes the weight's .grad; None of any other.
        """
        if number is not None:
            if self.last_backward not in (None, number) and self.weight.grad is None:
                self.drop_arrived()  # others have cleared it since
            self.last_backward = number
        # Products with eigenvectors of before could not be added to those with the present ones.
        fits = not self.covariance.depends_on_statistics or waiting.covariance is self.covariance
        if self.armed and waiting.clear_count != self.clear_count and fits:
            self.arrived = waiting.sums.plus(self.arrived)
        waiting.clear_count = self.clear_count


class WaitingSums:
    """A hook on the graph: one call of a layer, which counts when a backward pass goes through it to the weight.

    Its sums wait in the graph, and go with it if no gradient comes. A pass that creates a graph may reach the weight
    later by the derivatives it makes and not by the output, as a loss on derivatives by the inputs does; so the
    gradients that it brings are watched in their turn.
    """

    __slots__ = ("clear_count", "covariance", "layer", "node", "outer_backward", "sums", "writes_grad")

    def __init__(self, layer: Any, sums: Sums, node: Any, writes_grad: bool) -> None:
        self.layer, self.covariance, self.sums = weakref.ref(layer), layer.covariance, sums
        #: The weight's node in the graph, and whether that writes to .grad of the optimizer's parameter.
        self.node, self.writes_grad = node, writes_grad
        #: The pass that a reentrant checkpoint calls the layer in again: its own pass is a part of that.
        self.outer_backward = _torch.backward_pass()
        #: The layer's `clear_count` when this was counted last.
        self.clear_count = -1

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> Any:
        layer, with_graph = self.layer(), torch.is_grad_enabled()
        if layer is None or all(gradient is None for gradient in gradients):
            return None
        # Of gradients in a batch the derivatives cannot be watched. Without its node it is not known which pass writes
        # .grad; one that does not would leave None there, as if somebody had cleared it.
        unknown = self.node is None or (with_graph and _torch.is_batched(gradients))
        if how := "grad" if unknown else _torch.reached_by(self.node):
            number = _torch.backward_pass() if self.outer_backward < 0 else self.outer_backward
            layer.arrive(self, number if self.writes_grad and how == "backward" else None)
        if not with_graph and not _torch.keeps_graph():
            # Nothing else can come, though the nodes may live on with a loss.
            self.sums, self.covariance = Sums([], 0), None
        return tuple(map(self._watched, gradients)) if with_graph else None

    def _watched(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or _torch.is_batched((gradient,)):
            return gradient
        gradient = gradient.view_as(gradient) if gradient.requires_grad else gradient.detach().requires_grad_()
        gradient.register_hook(self._derivative)
        return gradient

    def _derivative(self, gradient: Tensor) -> Tensor | None:
        watched = self((gradient,))
        return None if watched is None else watched[0]


def unwrapped_input(name: str, module: nn.Module, input: Tensor) -> Tensor:
    """Return a layer's input without the transforms of torch.func and forward-mode AD that wrap it.

    Call it within `outside_transforms`, and all that uses the result.
    """
    weight: Any = module.weight
    is_mapped = _torch.functorch.is_batchedtensor(weight)
    if not is_mapped and not _torch.functorch.is_functorch_wrapped_tensor(input):
        # The tensor itself: layers that read it too are told by it. A dual tensor leaves its tangent behind.
        return input if forward_ad.unpack_dual(input).tangent is None else input.detach()
    mapped_dims: list[int] = []  # the dimension of each level of vmap, in the tensor without the levels around it
    while _torch.functorch.is_functorch_wrapped_tensor(input):
        if _torch.functorch.is_batchedtensor(input):
            mapped_dims.append(_torch.functorch.maybe_get_bdim(input))
        input = _torch.functorch.get_unwrapped(input)
    if is_mapped or (mapped_dims and hasattr(module, "input_rows")):
        raise RuntimeError(
            f"{name}: vmap maps over {'this weight' if is_mapped else 'the argument of input_rows'}, so that the rows "
            "of its layer cannot be told; detach() the optimizer first, or call the model without vmap."
        )
    dims = list(range(input.dim()))
    input = input.permute(*[dims.pop(dim) for dim in reversed(mapped_dims)], *dims)
    if mapped_dims and isinstance(module, _ConvNd):  # the mapped dimensions become samples
        input = input.flatten(0, -2 - len(module.kernel_size))
    return input.detach()


def nodes_of(output: Any, input: Tensor) -> Collection[Any]:
    """Return the nodes of the graph that made a layer's output of an input."""
    if isinstance(output, Tensor):
        # Of a view, as a linear layer returns for more than two dimensions, an operation in place makes another node.
        base = output._base if output._is_view() else None
        made = [output] if base is None or base is input or base is input._base else [output, base]
        return {tensor.grad_fn for tensor in made if tensor.grad_fn is not None}
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return {node for part in parts for node in nodes_of(part, input)}


def node_of(weight: Tensor) -> Any:
    """Return the node of a weight in the graphs that it is in; call it with gradients enabled."""
    # fully_shard has put its own part of the weight in place again if it is applied to the very layer.
    if hasattr(weight, "placements"):
        return None
    alias: Any = weight.view_as(weight)
    return weight.grad_fn or alias.grad_fn.next_functions[0][0]


class InputHook:
    """A forward hook that belongs to a `LayerInputs` and does nothing without it.

    A copy or a pickle of the model alone (an average of weights, a target network) does not copy it.
    """

    def __init__(self, layer: Any, place: int) -> None:
        self.layer, self.place = weakref.ref(layer), place
        # A tensor, not a number: the graph stays the same for another hook, and the operation says that it writes to
        # it, so that no compiler drops or reorders it.
        self.token = torch.tensor([new_token(self)], device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        return {"layer": _no_layer}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        layer = self.layer()
        # Not module.training: many fine-tune under eval().
        if layer is None or not torch.is_grad_enabled() or _torch.is_exporting() or torch.jit.is_tracing():
            return
        if "_is_replica" in module.__dict__:  # getattr takes a microsecond to find nothing
            raise RuntimeError(
                f"{layer.name!r} is called by nn.DataParallel on a copy of the layer, in a thread of its own, whose "
                "rows the optimizer cannot add up. Use DistributedDataParallel, by torchrun; or one device."
            )
        # By whatever name: nn.Linear calls it input, transformers' Conv1D x.
        input = args[0] if args else kwargs[first_argument(module, kwargs)]
        if torch.compiler.is_dynamo_compiling() and type(input) in (Tensor, nn.Parameter):
            # Both are guarded on: between measurements there is another graph, without any of this.
            if layer.armed or not layer.called:
                count_in_graph(self.token, input)
        else:
            self.count(input, output)

    def count(self, input: Tensor, output: Any) -> None:
        """Count the rows of one call; for `output` see `LayerInputs.add`."""
        layer = self.layer()
        if layer is None:
            return
        refuse_capture(layer.name, "remembers its inputs", layer.weight)
        layer.called = True
        if layer.armed:
            layer.add(layer.modules[self.place], input, output)


def _no_layer() -> None:
    """Return None, as a dead weak reference does; torch.compile traces a function."""
