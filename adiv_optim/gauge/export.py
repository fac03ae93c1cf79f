"""The program that torch.export makes of a model, and why it cannot make one."""

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..rows.models import refuse_lazy, refuse_sharded

#: Why the channels that a model returns are pinned.
OUTPUT = "output of the model"


@contextmanager
def _tensors_out(model: nn.Module) -> Iterator[list[str]]:
    """Let the model return tensors alone, also those in caches; yields a list that gets the reasons to pin them."""
    set_on_instance, forward = model.__dict__.get("forward"), model.forward
    reasons: list[str] = []

    @functools.wraps(forward)
    def returning_tensors(*args: Any, **kwargs: Any) -> list[Tensor]:
        leaves = pytree.tree_leaves(forward(*args, **kwargs))
        pairs = [(leaf, tensor) for leaf in leaves for tensor in _tensors_in(leaf, set())]
        reasons[:] = [OUTPUT if leaf is tensor else f"{OUTPUT}, in a {type(leaf).__name__}" for leaf, tensor in pairs]
        return [tensor for _, tensor in pairs]

    model.__dict__["forward"] = returning_tensors
    try:
        yield reasons
    finally:
        del model.__dict__["forward"]
        if set_on_instance is not None:
            model.__dict__["forward"] = set_on_instance


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors of a value, itself one or not."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, (nn.Module, type)):
        seen.add(id(value))
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, set)) else ()
        for part in [*parts, *getattr(value, "__dict__", {}).values()]:
            yield from _tensors_in(part, seen)


def export(model: nn.Module, example_input: Any) -> tuple[Any, list[str]]:
    """Return the program, and why each of its outputs is pinned, where that is not `OUTPUT`; raise as `trace` says."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace: model must be a torch.nn.Module, found {type(model).__name__}.")
    refuse_lazy("trace", model)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ValueError(
            "trace: torch.jit has compiled a part of the model, which torch.export cannot look into; trace the model "
            "that it was made of, whose graph fits this one too: UnitConsistent(…, graph=graph)."
        )
    refuse_sharded(
        "trace", model, "trace the model before it is sharded, and pass on the graph: UnitConsistent(…, graph=graph)"
    )
    named = isinstance(example_input, Mapping)  # a dict, or a tokenizer's BatchEncoding
    keywords = dict(example_input) if named else {}
    arguments = () if named else example_input if isinstance(example_input, tuple) else (example_input,)
    try:
        with _tensors_out(model) as reasons, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's, about itself
            return torch.export.export(model, arguments, keywords, strict=False), reasons
    except Exception as error:
        leaves = pytree.tree_leaves((arguments, keywords))
        shapes = ", ".join(str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"torch.export cannot trace {type(model).__name__} with an example_input of shape {shapes}, and so its "
            f"channels cannot be found; does the model run on it? {type(error).__name__}: {first}"
        ) from error
