"""The optimizer inside: how far its step reads weights, and how it decays them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, optim
from torch.optim import Optimizer

#: These read their state and the gradient, and a weight where it decays and nowhere else; their state holds no weights.
KNOWN: set[type[Optimizer]] = {optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax}
KNOWN |= {optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Muon}


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and those within it that take its step.

    A class, and not its subclasses, names by `takes_step_of` the attribute that holds the optimizers of its step.
    """
    name = vars(type(optimizer)).get("takes_step_of")
    if name is None:
        return [optimizer]
    inside = getattr(optimizer, name)
    parts = [inside] if isinstance(inside, Optimizer) else inside
    return [optimizer, *(each for part in parts for each in optimizers_in(part))]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether there are hooks on a step, which may read the weights in it."""
    return any(each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks for each in optimizers_in(optimizer))


def has_zero_lr(group: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a parameter group is 0; one on a device is not waited for."""
    rate = group.get("lr")  # None where the optimizer finds its own, as Adafactor does
    return rate is not None and not (isinstance(rate, Tensor) and rate.device.type != "cpu") and float(rate) == 0


def decay_factors(optimizer: Optimizer) -> dict[int, float]:
    r"""Return by the ids of weights the factor c of a step :math:`w \leftarrow c w + \Delta` whose Δ is free of w.

    It is 1 without weight decay, and 1 − ηλ where that is decoupled. Left out are weights that the step may read
    otherwise: of optimizers that are not torch's own, of a decay that is part of the gradient, of a learning rate on a
    device to be waited for, and of a step that has been replaced.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> list(decay_factors(torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)).values())
        [0.95]
        >>> decay_factors(torch.optim.SGD([weight], lr=0.1, weight_decay=0.5))
        {}
    """
    every = optimizers_in(optimizer)
    if not all(map(_steps_as_its_type, every)):
        return {}
    factors: dict[int, float] = {}
    for each in every:
        for group in each.param_groups if type(each) in KNOWN else ():
            rate, decay = group["lr"], group.get("weight_decay", 0.0)
            is_decoupled = isinstance(each, (optim.AdamW, optim.Muon)) or group.get("decoupled_weight_decay")
            if decay == 0:
                factors |= dict.fromkeys(map(id, group["params"]), 1.0)
            elif is_decoupled and (not isinstance(rate, Tensor) or rate.device.type == "cpu"):
                factors |= dict.fromkeys(map(id, group["params"]), float(1 - rate * decay))
    return factors


def _steps_as_its_type(optimizer: Optimizer) -> bool:
    """Whether its step is its type's; torch's schedulers set one on the instance that counts the calls and no more."""
    step = vars(optimizer).get("step")
    counted = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is None or counted
