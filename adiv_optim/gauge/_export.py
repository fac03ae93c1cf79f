"""Having torch.export write down what a model does, and saying why where it cannot."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..corrected_layers import PLAIN, Corrected, swapped
from ..sharding import refuse_sharded


def check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet; run one batch through the model first.")
    refuse_sharded("trace", model, "trace the model before it is sharded")


@contextmanager
def _plain_layers(model: nn.Module) -> Iterator[None]:
    """Corrected layers compute what plain ones do, through functions that torch.export cannot look into."""
    attached = [(module, type(module)) for module in model.modules() if isinstance(module, Corrected)]
    for module, corrected in attached:
        module.__class__ = swapped(corrected, PLAIN)
    try:
        yield
    finally:
        for module, corrected in attached:
            module.__class__ = corrected


def export(model: nn.Module, example_input: Any) -> Any:
    keywords = example_input if isinstance(example_input, dict) else {}
    arguments = () if keywords else example_input if isinstance(example_input, tuple) else (example_input,)
    with _plain_layers(model), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # torch's, about itself
        try:
            return torch.export.export(model, arguments, keywords, strict=False)
        except Exception as error:
            shapes = ", ".join(
                str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else repr(leaf)
                for leaf in pytree.tree_leaves((arguments, keywords))
            )
            failed = _failure(model, arguments, keywords)
            name = type(model).__name__
            if failed is not None:
                raise ValueError(f"{name} does not run on an example_input of shape {shapes}: {failed}") from error
            raise ValueError(
                f"{name} runs on an example_input of shape {shapes}, but torch.export cannot trace it, so its channels "
                f"cannot be found: {_first_line(error)}"
            ) from error


def _failure(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> str | None:
    """What a copy of the model says when it is simply called, to tell a wrong input from a model beyond tracing."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            copy.deepcopy(model)(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
