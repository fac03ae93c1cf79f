"""Optimizers that cannot step in other variables: they hold another optimizer, or weights in their state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def refuse_within(name: str, optimizer: Optimizer) -> None:
    """Raise a ValueError where an optimizer holds another one, which has a state."""
    around = type(optimizer).__name__
    if around == "ZeroRedundancyOptimizer":
        raise ValueError(f"{name} around ZeroRedundancyOptimizer: shard by torch.distributed.fsdp.fully_shard instead.")
    inside = next((type(value).__name__ for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)
    if inside:  # a chain has its optimizers in a tuple
        raise ValueError(
            f"{name} around {around}, which holds an optimizer itself: it would mix weights of one step's variables "
            f"with those of another's. Write {around}({name}({inside}(…), model), …)."
        )


def refuse_kept_weights(name: str, unknown: Iterable[Optimizer], before: Mapping[Tensor, Tensor]) -> None:
    """Raise a ValueError if the state of one of these optimizers has copies of weights, or a distance between them.

    Called when the optimizer is wrapped, and at the end of its first step with gradients, when `before` has the weights
    as it found them; later copies go unnoticed.
    """
    for each in unknown:
        # D-Adaptation and those after it; Adafactor has a setting d.
        has_distance = any({"d", "growth_rate"} <= group.keys() for group in each.param_groups)
        entries = ["d"] if has_distance or type(each).__name__.startswith("DAdapt") else []
        for parameter in (p for group in each.param_groups for p in group["params"] if p in each.state):
            copies = parameter, before.get(parameter, parameter)
            entries += [key for key, value in each.state[parameter].items() if any(_is_copy(value, c) for c in copies)]
        if entries:
            within = type(each).__name__
            raise ValueError(
                f"{name} around {within}, whose state holds weights or a distance between weights ({entries[0]}): it "
                f"would mix those of one step's variables with another's. Use {within} without {name}, or wrap an "
                f"optimizer that reads p and p.grad; a Lookahead goes around it: Lookahead({name}(AdamW(…), model))."
            )


def checked_step(
    name: str, unknown: Sequence[Optimizer], groups: Iterable[Mapping[str, Any]], step: Callable[[], Any]
) -> bool:
    """Step, look for copies of weights, and say whether there could be some: without gradients none are made yet.

    Where they are refused all weights of `groups` are as before: a chain's other optimizers step as well.
    """
    before = {p: p.detach().clone() for group in groups for p in group["params"]} if unknown else {}
    theirs = [p for each in unknown for group in each.param_groups for p in group["params"]]
    has_gradients = any(p.grad is not None for p in theirs)
    step()
    try:
        refuse_kept_weights(name, unknown, before)
    except ValueError:
        for p, old in before.items():
            p.copy_(old)
        raise
    return has_gradients or not unknown


def _is_copy(value: Any, weight: Tensor) -> bool:
    """Whether a tensor of a state is a copy of a weight, of either precision; whole numbers may agree by chance."""
    if not isinstance(value, Tensor) or value.shape != weight.shape or weight.is_meta or not value.is_floating_point():
        return False
    narrow = min(value.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(value.to(weight.device, narrow), weight.to(narrow)) and bool((value != value.round()).any())
