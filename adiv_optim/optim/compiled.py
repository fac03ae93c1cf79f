"""Rows of layers in graphs of torch.compile: one operation counts them, which the compiler does not look into."""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, library
from torch.fx.node import has_side_effect

#: Hooks by the tokens that stand for them in graphs.
_tokens = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_token(hook: Any) -> int:
    """Return the token of a hook, which has a method `count(input, output)`."""
    token = next(_tokens)
    _hooks[token] = hook
    return token


@has_side_effect
@torch.compiler.allow_in_graph
def count_in_graph(token: Tensor, input: Tensor) -> None:
    """Let the hook of a token count an input, each time that the graph runs."""
    # A backend that runs the graph as it is gives a real token, which activation checkpoints keep: write to a copy.
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
