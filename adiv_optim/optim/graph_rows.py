"""The operation that counts what a layer reads in a graph of torch.compile, which does not look into it."""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, library
from torch.fx.node import has_side_effect

_keys = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def token_of(hook: Any) -> Tensor:
    """A name for a hook in graphs.

    A tensor, not a number: the graph stays the same for another one, and the operation says that it writes to it, so
    that no compiler drops or reorders it.
    """
    key = next(_keys)
    _hooks[key] = hook
    return torch.tensor([key], device="cpu")


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
        hook.count(input, None)


@_count_rows.register_fake
def _(token: Tensor, input: Tensor) -> None:
    return None
