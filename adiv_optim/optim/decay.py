"""The decay of weights in an optimizer's step, and whether the step reads the weights otherwise."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from .probe import KNOWN, decoupled_decay, kind_of

#: How the decay of a kind of parameters acts, as `decoupled_decay` has measured it.
Kinds = dict[Any, Callable[[Any, float], Any] | None]


class Decay(NamedTuple):
    """The decay of a weight: its factor, and whether the step reads the weight otherwise."""

    factor: float
    is_read: bool = False


#: By the ids of weights, the decay of each.
Decays = Mapping[int, Decay]
#: The decay of a weight that none is known of.
UNKNOWN = Decay(1.0, is_read=True)


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


def decay_factors(optimizer: Optimizer, kinds: Kinds | None = None) -> dict[int, Decay]:
    r"""Find for weights, by their ids, the factor c of a step :math:`w \leftarrow c w + \Delta`.

    It is 1 without weight decay, and where that is decoupled mostly 1 − ηλ. Weights of which it is not known are left
    out: the decay is part of the gradient, the learning rate is on a device to be waited for, or the step has been
    replaced. Δ is free of w, but for optimizers that are not torch's own or are known to read it: see `Decay`. `kinds`
    has how decays act, as far as it has been measured; more of it is added.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> list(decay_factors(torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)).values())
        [Decay(factor=0.95, is_read=False)]
        >>> decay_factors(torch.optim.SGD([weight], lr=0.1, weight_decay=0.5))
        {}
    """
    every, kinds = optimizers_in(optimizer), {} if kinds is None else kinds
    if not all(map(_steps_as_its_type, every)):
        return {}
    factors: dict[int, Decay] = {}
    for each in every:
        if "takes_step_of" in vars(type(each)):
            continue
        is_read = type(each) not in KNOWN
        for group in each.param_groups:
            rate, decay, parameters = group.get("lr"), group.get("weight_decay", 0.0), group["params"]
            if isinstance(decay, Tensor):
                continue
            if not decay:
                factors |= dict.fromkeys(map(id, parameters), Decay(1.0, is_read))
            elif not isinstance(rate, Tensor) or rate.device.type == "cpu":
                kind = id(each), *kind_of(group)
                for ndim, like in {p.ndim: p for p in parameters}.items():
                    key = ndim, kind
                    if key not in kinds:
                        kinds[key] = decoupled_decay(each, group, like)
                    if factor := kinds[key]:
                        same = [id(p) for p in parameters if p.ndim == ndim]
                        factors |= dict.fromkeys(same, Decay(float(factor(rate, decay)), is_read))
    return factors


def _steps_as_its_type(optimizer: Optimizer) -> bool:
    """Whether its step is its type's; torch's schedulers set one on the instance that counts the calls and no more."""
    step = vars(optimizer).get("step")
    counted = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is None or counted
