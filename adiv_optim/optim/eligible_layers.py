"""Which layers can be measured: whose weights multiply rows that their class, or a method `input_rows`, makes known."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from ..rows.layers import Layout, is_from_torch, plain_type, why_unknown_rows
from ..rows.models import IN_SKIP, Skip, bypassed, named_in_skip, overlaps

#: The way to make the rows of a layer of any class known.
_DECLARE = "; a method input_rows(input) on that class makes them known"


def eligible_layers(
    where: str, model: nn.Module, parameters: Iterable[nn.Parameter], skip: Skip, why_bias_is_plain: str
) -> tuple[list[tuple[str, list[nn.Module], bool]], dict[str, str]]:
    """Find the layers whose weights the optimizer holds and multiply rows that are known.

    Return of each weight, frozen ones too, its name, the modules that share it, and whether the bias is treated with
    it; and by name why parameters of the optimizer take the plain step. `where` opens the messages of errors.
    """
    of_optimizer = {*parameters}
    refuse_private_gradients(where, of_optimizer)
    skipped = named_in_skip(model, skip, may_be_missing=True)
    users, names = dict[nn.Parameter, list[nn.Module]](), dict[nn.Parameter, str]()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if parameter in of_optimizer:
                users.setdefault(parameter, []).append(module)
                names.setdefault(parameter, name)
    twice, uncalled = overlaps({name: parameter for parameter, name in names.items()}), bypassed(model)
    by_fsdp = {part for each in model.modules() if hasattr(each, "_get_fsdp_state") for part in each.modules()}
    layers: list[tuple[str, list[nn.Module], bool]] = []
    reasons, of_biases = dict[nn.Parameter, str](), dict[nn.Parameter, str]()  # of a bias "" where it is treated
    for parameter, modules in users.items():
        name = names[parameter]
        why = IN_SKIP * (not skipped.isdisjoint(modules)) or next((uncalled[m] for m in modules if m in uncalled), "")
        why = why or twice.get(id(parameter), "") or _why_no_rows(name, parameter, modules)
        if hasattr(parameter, "placements") and by_fsdp.isdisjoint(modules):
            why = why or "a DTensor, but not one of fully_shard; tensor parallelism may deal out the rows that it reads"
        if why:
            reasons[parameter] = why
            continue
        bias: Any = getattr(modules[0], "bias", None)  # a layer with `input_rows` may have none
        joins = isinstance(bias, nn.Parameter) and users.get(bias) == modules and id(bias) not in twice
        outputs = parameter.shape[-1:] if Layout.of(modules[0]).transposed else parameter.shape[:1]
        joins = joins and bias.requires_grad == parameter.requires_grad and bias.shape == outputs
        with_bias = joins and not why_bias_is_plain
        if not parameter.requires_grad:
            reasons[parameter] = "frozen"
        elif joins:
            of_biases[bias] = why_bias_is_plain
        if parameter.numel() or with_bias:
            layers.append((name, modules, with_bias))
        else:
            reasons[parameter] = "without entries"
    return layers, {names[parameter]: why for parameter, why in (reasons | of_biases).items() if why}


def _why_no_rows(name: str, parameter: nn.Parameter, modules: list[nn.Module]) -> str:
    """Say why a parameter is not a weight whose rows are known, or ""."""
    for module in modules:
        why, declares_rows = why_unknown_rows(module), callable(getattr(module, "input_rows", None))
        if plain_type(module) is parametrize.ParametrizationList:
            return "parametrized"
        if why and ("forward" in module.__dict__ or not declares_rows):
            can_declare = "forward" not in module.__dict__ and not is_from_torch(type(module))
            is_matrix = module._parameters.get("weight") is parameter and parameter.dim() > 1
            return why + _DECLARE * (can_declare and is_matrix and not isinstance(module, nn.Embedding))
        if parametrize.is_parametrized(module):
            return "parametrized"
        if module._parameters.get("weight") is not parameter:
            bias = name.rpartition(".")[2] == "bias"
            why = "a bias without its weight" if bias else "not a weight that the layer uses as it is"
            return why if parameter.requires_grad else "frozen"
        if parameter.dim() < 2:
            return "a weight of fewer than two dimensions, which multiplies no rows"
    return "complex" if parameter.is_complex() else ""


def refuse_private_gradients(name: str, parameters: Iterable[nn.Parameter]) -> None:
    """Raise a ValueError where Opacus makes the gradients: no noise hides the memory of private inputs."""
    if any(hasattr(parameter, "grad_sample") for parameter in parameters):
        raise ValueError(
            f"{name} measures inputs, and keeps what it measured without noise, so that the ε which Opacus reports "
            "would not hold for its steps. With differential privacy take the optimizer without it, or "
            "DPOptimizer(UnitConsistent(…), …), which reads weights alone."
        )
