"""Counting what layers read within graphs of torch.compile and within transforms of torch.func.

In a graph one operation counts, which the compiler does not look into. Within transforms the rows are those of the
primal tensor, once: tangents add none, and what vmap maps over is one more dimension of rows.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, library, nn
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
from torch.autograd import forward_ad
from torch.fx.node import has_side_effect
from torch.nn.modules.conv import _ConvNd
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Traced", "count", "countable", "outside_transforms", "rows_within", "token_of"]


class Hook(Protocol):
    """What counts the rows of one module."""

    #: The module's number among those of one weight.
    place: int

    def sums(self) -> Any:
        """Return what rows are added to, or None."""

    def count(self, input: Tensor, readers: "Traced | None" = None) -> None:
        """Count the rows of one call."""


class Traced:
    """Which layer has counted a tensor within a graph, as `followers.Readers` tell it outside of graphs.

    Args:
        hook: of the layer that is called.
        earlier: of those that have read this very tensor before, and nothing since.
    """

    def __init__(self, hook: Hook, earlier: Sequence[Hook]) -> None:
        self.hook, self.earlier = hook, earlier

    def last(self, layer: Any, input: Tensor) -> Any:
        """The layer whose last call counted this very tensor as this one would."""
        for hook in self.earlier:
            first = hook.sums()
            if getattr(first, "readers", None) is not layer.readers or first.kind != layer.kind:
                continue
            if first.mark == hook.place:  # another module with its weight may have been called since
                return first
        return None

    def note(self, layer: Any, input: Tensor) -> object:
        """Return what the layer's mark is until its next call."""
        return self.hook.place


_keys = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Hook] = weakref.WeakValueDictionary()

#: While a graph is traced: by token the tensor that its layer has read last, and its version then.
_last_read: Any = WeakIdKeyDictionary()


def token_of(hook: Hook) -> Tensor:
    """Return what names a hook in graphs, for as long as it lives.

    A tensor, not a number: the graph stays the same for another one, and the operation says that it writes to it, so
    that no compiler drops or reorders it.
    """
    key = next(_keys)
    _hooks[key] = hook
    return torch.tensor([key], device="cpu")


def countable(input: Any) -> bool:
    """Whether a graph is traced that may have `count` of this input, which is no DTensor then.

    Asked within a transform of torch.func, it breaks the graph.
    """
    traced = torch.compiler.is_dynamo_compiling() and _functorch.maybe_current_level() is None
    return traced and type(input) in (Tensor, nn.Parameter)


@has_side_effect
@torch.compiler.allow_in_graph
def count(token: Tensor, input: Tensor) -> None:
    """Count what a layer reads, in a graph.

    Runs as the graph is traced, and finds which layers have read the same tensor before. The compiled graph could not
    tell: it puts other numbers into a tensor's memory when it has no more use for it.
    """
    if type(token) is Tensor:  # of a backend that runs what it is given as it is; checkpoints keep the token
        _count_rows(token.clone(), [], input.detach())
        return
    now = None if input.is_inference() else input._version
    earlier = [other for other, (read, then) in _last_read.items() if read() is input and then == now]
    _last_read[token] = weakref.ref(input), now
    _count_rows(token, [other for other in earlier if other is not token], input.detach())


@library.custom_op(
    "adiv_optim::count_rows",
    mutates_args=("token",),
    schema="(Tensor(a0!) token, Tensor[] earlier, Tensor input) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),  # the replay of a CUDA graph would not count
)
def _count_rows(token: Tensor, earlier: Sequence[Tensor], input: Tensor) -> None:
    hook = _hooks.get(int(token))
    if hook is not None:
        found = [_hooks.get(int(other)) for other in earlier]
        hook.count(input, Traced(hook, [other for other in found if other is not None]))


@_count_rows.register_fake
def _(token: Tensor, earlier: Sequence[Tensor], input: Tensor) -> None:
    return None


def rows_within(name: str, module: nn.Module, input: Tensor) -> Tensor:
    """What a layer reads, without the transforms of torch.func and forward-mode AD that it is called within.

    Call it within `outside_transforms`, as all that is done with the result.

    Raises:
        RuntimeError: vmap maps over the weight, or over the input of a layer with `input_rows`.
    """
    weight: Any = module.weight
    if _functorch.is_batchedtensor(weight):
        raise _mapped(name, "this weight")
    if not _functorch.is_functorch_wrapped_tensor(input):
        # The tensor itself: layers that read it too are told by it. A dual tensor leaves its tangent behind.
        return input if forward_ad.unpack_dual(input).tangent is None else input.detach()
    places: list[int] = []  # what vmap maps over, of each tensor without the levels around it
    mapped = input
    while _functorch.is_functorch_wrapped_tensor(mapped):
        if _functorch.is_batchedtensor(mapped):
            places.append(_functorch.maybe_get_bdim(mapped))
        mapped = _functorch.get_unwrapped(mapped)
    if not places:
        return mapped.detach()
    own = list(range(mapped.dim()))
    mapped = mapped.permute(*[own.pop(place) for place in reversed(places)], *own)
    if hasattr(module, "input_rows"):
        raise _mapped(name, "what input_rows reads")
    if isinstance(module, _ConvNd):  # all that is mapped over is one dimension of samples
        channels = len(module.kernel_size) + 1
        mapped = mapped.flatten(0, mapped.dim() - channels - 1)
    return mapped.detach()


def _mapped(name: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: vmap maps over {what}, so that the rows of its layer cannot be told; detach() the optimizer first, "
        "or call the model without vmap."
    )
