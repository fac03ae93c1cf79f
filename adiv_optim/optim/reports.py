"""The report of a wrapper on the parameters that its optimizer trains."""

from torch import nn
from torch.optim import Optimizer

from ..rows.coverage import Coverage

#: Why a parameter of the optimizer takes the plain step, of a wrapper that was given a part of a model, say.
OUTSIDE = "no parameter of the model that was wrapped"


def names_and_parameters(optimizer: Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters by their names in the model, then others by their places in its groups."""
    every = {
        id(p): (f"param_groups[{number}]['params'][{place}]", p)
        for number, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
    }
    of_model = {name: p for name, p in model.named_parameters() if every.pop(id(p), None)}
    return {**of_model, **dict(every.values())}


def report(optimizer: Optimizer, model: nn.Module, coverage: Coverage, unknown: str) -> Coverage:
    """Say of each of the optimizer's parameters whether it is treated, or that it is none of the model's.

    Args:
        optimizer: whose parameters.
        model: the model.
        coverage: by names in the model.
        unknown: why other parameters of the model are plain.
    """
    parameters = names_and_parameters(optimizer, model)
    of_model = {name for name, _ in model.named_parameters() if name in parameters}
    treated, never_seen = (
        {name: how for name, how in said.items() if name in of_model}
        for said in (coverage.treated, coverage.never_seen)
    )

    def why_plain(name: str, parameter: nn.Parameter) -> str:
        if name not in of_model:
            return OUTSIDE
        return coverage.skipped.get(name) or unknown if parameter.requires_grad else "frozen"

    untreated = parameters.keys() - treated.keys() - never_seen.keys()
    skipped = {name: why_plain(name, p) for name, p in parameters.items() if name in untreated}
    return Coverage(treated, skipped, never_seen, {name: p.numel() for name, p in parameters.items()})


def explain_replaced_parameters(optimizer: Optimizer, model: nn.Module, starved: bool) -> str:
    """Say that the optimizer's weights are no longer the model's, or if `starved` that none has had a gradient."""
    of_optimizer = names_and_parameters(optimizer, model)
    names = dict(model.named_parameters())
    replaced = [
        name for name, p in names.items() if name not in of_optimizer and p.grad is not None and p.requires_grad
    ]
    outside = [name for name in of_optimizer if name not in names]
    if outside and replaced:
        return (
            f"{', '.join(replaced[:3])}{', …' * (len(replaced) > 3)} of {type(model).__name__} has a gradient and is "
            f"none of the optimizer's parameters, of which {outside[0]} is none of the model's: the optimizer's "
            "weights are no longer this model's. Build the optimizer from the model as it is now, and wrap again."
        )
    if starved:
        return (
            "no parameter that the optimizer holds has had a gradient: if another model trains, made after this one "
            "was wrapped, the optimizer's weights are no longer that model's. Build it from that one, and wrap again."
        )
    return ""
