"""An optimizer and a model: whether its parameters are the model's, and a report on each of them."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..corrections import Correction
from ..rows.models import Coverage

#: What to say where a model stands in the place of an optimizer, or the other way round.
WRONG_ORDER = "These are the arguments in the wrong order: the optimizer comes first, then the model."
#: Why a parameter of the optimizer takes the plain step, of a wrapper that was given a part of a model, say.
OUTSIDE = "no parameter of the model that was wrapped"


def report(optimizer: Optimizer, model: nn.Module, coverage: Coverage, unknown: str) -> Coverage:
    """Return a model's `coverage` of what an optimizer holds; parameters of no model stand by their places in groups.

    `unknown` says why parameters of the model are plain that `coverage` does not have.
    """
    places = {
        p: f"param_groups[{number}]['params'][{place}]"
        for number, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
    }
    of_model = {name: p for name, p in model.named_parameters() if places.pop(p, None)}
    parameters = {**of_model, **{place: p for p, place in places.items()}}
    treated, never_seen = (
        {name: how for name, how in said.items() if name in of_model}
        for said in (coverage.treated, coverage.never_seen)
    )
    skipped = {}
    for name, parameter in parameters.items():
        if name not in of_model:
            skipped[name] = OUTSIDE
        elif name not in treated and name not in never_seen:
            skipped[name] = coverage.skipped.get(name) or unknown if parameter.requires_grad else "frozen"
    return Coverage(treated, skipped, never_seen, {name: p.numel() for name, p in parameters.items()})


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model itself, which DistributedDataParallel and torch.compile give other names."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inside: Any = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        model = inside
    return model


def check_model(name: str, model: nn.Module) -> None:
    """Raise if `model` is none; `name` opens the message."""
    if not isinstance(model, nn.Module):
        order = f" {WRONG_ORDER}" * isinstance(model, (Optimizer, Correction))
        raise TypeError(f"{name}: model must be a torch.nn.Module, found {type(model).__name__}.{order}")


def check_same_parameters(name: str, optimizer: Optimizer, model: nn.Module) -> None:
    """Raise if `optimizer` holds no parameter of `model`, or one without a shape; `name` opens the message."""
    check_model(name, model)
    in_groups = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    if lazy := [path for path, parameter in named.items() if id(parameter) in in_groups and is_lazy(parameter)]:
        raise ValueError(f"{name}: the optimizer holds {lazy[0]!r}, which has no shape yet; run one batch first.")
    if not any(id(parameter) in in_groups for parameter in named.values()):
        first = next(iter(named), "none")
        raise ValueError(
            f"{name}: none of the {len(in_groups)} tensors the optimizer holds is a parameter of the model "
            f"({len(named)} parameters, the first: {first}). Build the optimizer from this model's "
            "parameters(), after any deepcopy that makes new ones."
        )
