"""Which weights multiply rows that are known and have a part here that can be mapped."""

from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..attach.checks import NAMED, Skip, bypassed, named_in_skip, overlaps, refuse_lazy
from ..attach.layers import is_torchs, plain_type, why_unknown_rows

#: What makes the rows of a layer of any class known.
_DECLARE = "; a method input_rows(input) on that class makes them known"


def eligible_layers(
    what: str, model: nn.Module, optimizer: Optimizer, skip: Skip, bias_is_plain: str
) -> tuple[list[tuple[str, list[nn.Module], bool]], dict[str, str]]:
    """Find the layers whose weights the optimizer holds and multiply rows that are known.

    Args:
        what: whose errors these are.
        model: the model.
        optimizer: whose parameters are meant.
        skip: modules to leave alone.
        bias_is_plain: why no bias is treated with its weight, or "".

    Returns:
        For each layer the weight's name, the modules that share it, and whether the bias goes with it; and by name why
        other parameters of the optimizer take the plain step.
    """
    skipped = named_in_skip(model, skip, gone=True)
    refuse_lazy(what, model, skipped)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    by_fsdp = (module for module in model.modules() if hasattr(module, "_get_fsdp_state"))
    managed, without_call = {part for module in by_fsdp for part in module.modules()}, bypassed(model)
    users: dict[int, list[nn.Module]] = {}
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if id(parameter) in held:
                users.setdefault(id(parameter), []).append(module)
                named.setdefault(id(parameter), (name, parameter))
    twice = overlaps(dict(named.values()))
    layers: list[tuple[str, list[nn.Module], bool]] = []
    together: set[int] = set()
    plain: dict[int, str] = {}
    plain_biases: dict[int, str] = {}
    for key, modules in users.items():
        name, parameter = named[key]
        why = NAMED if not skipped.isdisjoint(modules) else ""
        why = why or next((without_call[module] for module in modules if module in without_call), "")
        why = why or twice.get(key, "") or _why_no_rows(name, parameter, modules)
        if hasattr(parameter, "placements") and managed.isdisjoint(modules):
            why = why or "a DTensor, but not one of fully_shard; tensor parallelism may deal out the rows that it reads"
        if why:
            plain[key] = why
            continue
        bias = getattr(modules[0], "bias", None)  # a layer with `input_rows` may have none
        with_bias = isinstance(bias, nn.Parameter) and bias.requires_grad and users.get(id(bias)) == modules
        with_bias = with_bias and id(bias) not in twice
        if with_bias and bias_is_plain:
            plain_biases[id(bias)], with_bias = bias_is_plain, False
        if parameter.numel() or with_bias:
            layers.append((name, modules, with_bias))
            together |= {key, id(bias)} if with_bias else {key}
        else:
            plain[key] = "without entries"
    plain = {key: why for key, why in (plain | plain_biases).items() if key not in together}
    return layers, {named[key][0]: why for key, why in plain.items()}


def _why_no_rows(name: str, parameter: nn.Parameter, modules: list[nn.Module]) -> str:
    """Say why a parameter is not a weight whose rows are known, or ""."""
    for module in modules:
        why, declares_rows = why_unknown_rows(module), callable(getattr(module, "input_rows", None))
        if plain_type(module) is parametrize.ParametrizationList:
            return "parametrized"
        if why and "forward" in module.__dict__:
            return why
        if why and not declares_rows:
            return why + _DECLARE * (module._parameters.get("weight") is not None and not is_torchs(type(module)))
        if parametrize.is_parametrized(module):
            return "parametrized"
        if module._parameters.get("weight") is not parameter and parameter.requires_grad:
            bias = name.rpartition(".")[2] == "bias"
            return "a bias without its weight" if bias else "not a weight that the layer uses as it is"
    if not parameter.requires_grad:
        return "frozen"
    return "complex" if parameter.is_complex() else ""
