"""Optimizers known to add to a weight a step that does not depend on it."""

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from .._linalg.shards import local
from .chained import ChainedOptimizer
from .wrapper import OptimizerWrapper

#: These read their state and the gradient, and a weight where it decays and nowhere else.
_KNOWN: set[type[Optimizer]] = {optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax}
_KNOWN |= {optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Muon}
#: Of these, those whose decay is always decoupled: w is multiplied by 1 − ηλ before the step is added.
_DECOUPLED: set[type[Optimizer]] = {optim.AdamW, optim.Muon}


def those_who_step(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, then the one within it that takes its step, as long as it is a wrapper that does nothing else."""
    found = [optimizer]
    while isinstance(optimizer, OptimizerWrapper) and _passes_on(optimizer):
        found.append(optimizer := optimizer.inner)
    return found


def all_who_step(optimizer: Optimizer) -> list[Optimizer]:
    """Those who step, and those that the last of them is made of."""
    found = those_who_step(optimizer)
    return [*found, *(found[-1].optimizers if isinstance(found[-1], ChainedOptimizer) else ())]


def _passes_on(optimizer: OptimizerWrapper) -> bool:
    kind = type(optimizer)
    # torch wraps the step of every class that an optimizer is made of.
    steps = {inspect.unwrap(each.step) for each in (kind, OptimizerWrapper)}
    own = len(steps) == 1 and kind._inner_step is OptimizerWrapper._inner_step
    return own and _steps_as_its_type(optimizer)


def is_known(optimizer: Optimizer) -> bool:
    """Whether its step is known; a subclass, or a step that was set on the instance, may read anything."""
    return type(optimizer) in _KNOWN and _steps_as_its_type(optimizer)


def kept_by_step(optimizer: Optimizer) -> dict[int, float]:
    r"""For each weight, by its id, the factor c of a step :math:`w \leftarrow c w + \Delta` with a Δ that is free of w.

    It is 1 without weight decay, and 1 − ηλ where that is decoupled. Weights of which it is not known, because the
    decay is part of the gradient, whose rate is on a device to be waited for or whose optimizer is not torch's own are
    left out.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> list(kept_by_step(torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)).values())
        [0.95]
        >>> kept_by_step(torch.optim.SGD([weight], lr=0.1, weight_decay=0.5))
        {}
    """
    optimizer = those_who_step(optimizer)[-1]
    kept: dict[int, float] = {}
    if isinstance(optimizer, ChainedOptimizer) and _steps_as_its_type(optimizer):
        for each in optimizer.optimizers:
            kept |= kept_by_step(each)
        return kept
    if not is_known(optimizer):
        return {}
    for group in optimizer.param_groups:
        factor, rate, decay = 1.0, group["lr"], group.get("weight_decay", 0.0)
        if isinstance(decay, Tensor):
            continue
        if decay:
            decoupled = type(optimizer) in _DECOUPLED or group.get("decoupled_weight_decay", False)
            if not decoupled or (isinstance(rate, Tensor) and rate.device.type != "cpu"):
                continue
            factor = float(1 - rate * decay)
        kept |= {id(parameter): factor for parameter in group["params"]}
    return kept


def copies_in_state(optimizer: Optimizer, parameter: Tensor, *weights: Tensor) -> dict[str, Tensor]:
    """By name, whether a tensor that an optimizer keeps of a parameter equals one of these weights, not all 0.

    Nothing for optimizers that are known to keep none.
    """
    optimizer = next((each for each in all_who_step(optimizer)[1:] if _holds(each, parameter)), optimizer)
    if type(optimizer) in _KNOWN:
        return {}
    parts, kept = [local(weight) for weight in weights], optimizer.state.get(parameter)
    return {
        key: torch.stack([part.any() & (local(value) == part).all() for part in parts]).any()
        for key, value in (kept.items() if isinstance(kept, Mapping) else ())
        if isinstance(value, Tensor) and _like(local(value), parts[0])
    }


def _holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(parameter is other for group in optimizer.param_groups for other in group["params"])


def _like(value: Tensor, weight: Tensor) -> bool:
    """Whether two tensors can be compared: of states in eight bits, or kept elsewhere, nothing is known."""
    same = all(getattr(value, name) == getattr(weight, name) for name in ("shape", "layout", "device"))
    return type(value) is Tensor and same and value.dtype.itemsize > 1


def _steps_as_its_type(optimizer: Optimizer) -> bool:
    """Whether its step is its type's; torch's schedulers set one on the instance that counts the calls and no more."""
    step = vars(optimizer).get("step")
    counted = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is None or counted
