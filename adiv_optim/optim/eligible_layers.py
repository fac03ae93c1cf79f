"""Which weights multiply rows that are known and have a part here that can be mapped; weight ↔ matrix."""

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, distributed, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from .._linalg.shards import DataParallelGroup, cut_of, why_not_one_cut
from ..attach.checks import NAMED, Skip, bypassed, named_in_skip, refuse_lazy
from ..attach.layers import is_transposed, plain_type, why_unknown_rows


class EligibleLayer(NamedTuple):
    """Modules that share a weight and multiply known rows by it, and the bias where that goes with it."""

    name: str
    modules: list[nn.Module]
    with_bias: bool

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Weight and bias, if that is treated with it."""
        names = ["weight", "bias"] if self.with_bias else ["weight"]
        return [self.modules[0].get_parameter(name) for name in names]


def eligible_layers(
    what: str, model: nn.Module, optimizer: Optimizer, skip: Skip, bias_is_plain: str
) -> tuple[list[EligibleLayer], dict[str, str]]:
    """Find the layers whose weights the optimizer holds and multiply rows that are known.

    Args:
        what: whose errors these are.
        model: the model.
        optimizer: whose parameters are meant.
        skip: modules to leave alone.
        bias_is_plain: why no bias is treated with its weight, or "".

    Returns:
        The layers, and by name why other parameters of the optimizer take the plain step.
    """
    skipped = named_in_skip(model, skip, gone=True)
    refuse_lazy(what, model, skipped)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    managed, without_call = managed_by_fsdp(model), bypassed(model)
    users: dict[int, list[nn.Module]] = {}
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if id(parameter) in held:
                users.setdefault(id(parameter), []).append(module)
                named.setdefault(id(parameter), (name, parameter))
    layers: list[EligibleLayer] = []
    plain: dict[int, str] = {}
    plain_biases: dict[int, str] = {}
    for key, modules in users.items():
        name, parameter = named[key]
        why = NAMED if not skipped.isdisjoint(modules) else ""
        why = why or next((without_call[module] for module in modules if module in without_call), "")
        if why := why or _why_no_rows(name, parameter, modules) or _why_not_sharded(parameter, modules, managed):
            plain[key] = why
            continue
        bias = getattr(modules[0], "bias", None)  # a layer with `input_rows` may have none
        with_bias = isinstance(bias, nn.Parameter) and bias.requires_grad and users.get(id(bias)) == modules
        if with_bias and bias_is_plain:
            plain_biases[id(bias)], with_bias = bias_is_plain, False
        if parameter.numel() or with_bias:
            layers.append(EligibleLayer(name, modules, with_bias))
        else:
            plain[key] = "without entries"
    together = {id(parameter) for layer in layers for parameter in layer.parameters}
    plain = {key: why for key, why in (plain | plain_biases).items() if key not in together}
    return layers, {named[key][0]: why for key, why in plain.items()}


def _why_no_rows(name: str, parameter: nn.Parameter, modules: list[nn.Module]) -> str:
    """Say why a parameter is not a weight whose rows are known, or ""."""
    for module in modules:
        why, declares_rows = why_unknown_rows(module), callable(getattr(module, "input_rows", None))
        if plain_type(module) is parametrize.ParametrizationList:
            return "parametrized"
        if why and ("forward" in module.__dict__ or not declares_rows):
            return why
        if parametrize.is_parametrized(module):
            return "parametrized"
        if module._parameters.get("weight") is not parameter and parameter.requires_grad:
            bias = name.rpartition(".")[2] == "bias"
            return "a bias without its weight" if bias else "not a weight that the layer uses as it is"
    if not parameter.requires_grad:
        return "frozen"
    return "complex" if parameter.is_complex() else ""


class Layout(NamedTuple):
    """How the parameters of a layer lie as matrices with a row for each output."""

    #: Whether the weight has a column for each output.
    transposed: bool
    #: How many matrices there are, one above the other.
    groups: int

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        """Return the layout of a layer's weight and bias."""
        return cls(is_transposed(module), int(getattr(module, "groups", 1)))

    def matrix(self, part: Tensor, stack: int = 0) -> Tensor:
        """What this process holds of a weight as (outputs, features), of a bias as (outputs, 1); groups in front.

        `stack` is 1 of a stack of such parts, and 0 of a single one.
        """
        before, shape = part.shape[:stack], part.shape[stack:]
        if len(shape) > 1 and self.transposed:
            return part.mT
        groups = (self.groups,) if self.groups > 1 else ()
        wanted = (*before, *groups, shape[0] // self.groups, shape[1:].numel())
        return part if part.shape == wanted else part.reshape(wanted)

    def part(self, matrix: Tensor, shape: tuple[int, ...], stack: int = 0) -> Tensor:
        """The inverse of `matrix`, in a shape; the dtype stays."""
        if len(shape) > stack + 1 and self.transposed:
            matrix = matrix.mT
        return matrix if matrix.shape == shape else matrix.reshape(shape)


def managed_by_fsdp(model: nn.Module) -> set[nn.Module]:
    """The modules whose parameters fully_shard has dealt to processes, each of which sees rows of its own."""
    return {part for module in model.modules() if hasattr(module, "_get_fsdp_state") for part in module.modules()}


def _why_not_sharded(parameter: nn.Parameter, modules: Sequence[nn.Module], managed: Container[nn.Module]) -> str:
    """Say why a weight is dealt to processes of which it is not known which rows each reads, or ""."""
    if hasattr(parameter, "placements") and not any(module in managed for module in modules):
        return "a DTensor, but not one of fully_shard; tensor parallelism may deal out the rows that it reads"
    return ""


def refuse_shards(what: str, layers: Iterable[EligibleLayer], processes: DataParallelGroup) -> None:
    """Raise a ValueError if parts of a layer are not whole rows, or are held by processes whose rows do not count.

    A map of columns takes whole rows, all of an output's weights, and which of them is no matter.

    Args:
        what: whose error it is.
        layers: layers that are to be treated.
        processes: whose inputs are added up.
    """
    for layer in layers:
        for parameter in layer.parameters:
            if why := _why_not(layer, parameter):
                raise ValueError(
                    f"{what}: {layer.name!r} is sharded as {_placed(parameter)}, {why}; cut weights and biases along "
                    "dimension 0 by fully_shard alone, which is its default, or name this layer in skip."
                )
        if hasattr(layer.parameters[0], "device_mesh"):
            _refuse_group(what, layer, processes)


def _refuse_group(what: str, layer: EligibleLayer, processes: DataParallelGroup) -> None:
    """Raise a ValueError if what a layer reads is not added up over all processes that hold a part of it."""
    mesh: Any = layer.parameters[0]
    counted = distributed.get_process_group_ranks(processes.group or distributed.group.WORLD)
    if missing := sorted({*mesh.device_mesh.mesh.flatten().tolist()}.difference(counted)):
        raise ValueError(
            f"{what}: ranks {missing} hold a part of {layer.name!r} and are not in process_group; what it reads "
            "must be added up over all of its mesh: give a group that has them, or leave process_group=None."
        )


def refuse_cuts(what: str, model: nn.Module) -> None:
    """Raise a ValueError if a parameter is sharded otherwise than by one cut along one of its dimensions."""
    for name, parameter in model.named_parameters():
        if why := why_not_one_cut(parameter):
            raise ValueError(
                f"{what}: {name!r} is sharded as {_placed(parameter)}, {why}; cut it once, by fully_shard or by "
                "parallelize_module alone."
            )


def _placed(parameter: Any) -> Any:
    return getattr(parameter, "placements", "a whole")


def _why_not(layer: EligibleLayer, parameter: Any) -> str:
    """Say why what processes hold of a parameter are not rows of the layer, or ""."""
    weight = layer.parameters[0]
    if _placed(parameter) != _placed(weight):
        return f"a bias, where its weight is {_placed(weight)}"
    if why := why_not_one_cut(parameter):
        return why
    cut, module = cut_of(parameter), layer.modules[0]
    kind = plain_type(module)
    if cut is None:
        return ""
    if cut.dim:
        return "not along dimension 0"
    if (groups := getattr(module, "groups", 1)) > 1:
        return f"and the rows of this {kind.__name__} belong to {groups} groups, each with inputs of its own"
    if is_transposed(module):
        return f"and the rows of this {kind.__name__}'s weight are inputs, not outputs"
    return ""
