"""Trace the channels of a model: torch.export lists its operations, and the rules say which scales these share."""

import copy
import itertools
import operator
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from ..optim.parameters import unwrapped
from ..rows.models import overlaps, refuse_lazy, refuse_sharded
from .call import Activation, Call, ParameterView
from .channels import PINNED, Channels, pinned
from .graph import ChannelGraph, Entry
from .layer_rules import batch_norm
from .rules import RULES, rearrange


def trace(model: nn.Module, example_input: Any) -> ChannelGraph:
    """Find which channels of which layers of a model share a positive scale.

    A network's function does not change when the weights into a hidden channel are multiplied by e^s and those out of
    it by e^(-s), as `apply_gauge` does, if the functions between are positively homogeneous: f(cx) = c f(x) for c > 0.
    Each channel has one log-scale s. Summands share theirs, concatenation and reshaping carry them along, and they
    are pinned to 0 at the model's inputs and outputs and wherever a function is not homogeneous: ReLU6, sigmoid, tanh,
    GELU, SiLU, softmax, the input of LayerNorm, RMSNorm and GroupNorm. The input of BatchNorm and InstanceNorm is free
    (exactly with a negligible eps only), and each element of a normaliser's γ is a new channel. In attention queries
    and keys are pinned and the values pass. Scales are joined as far as all uses of a tied weight need to move it
    alike. An operation without a rule pins all that it touches; `Entry.why` names it.

    Args:
        model: any module that torch.export can trace, in the mode (training or evaluation) that it will be used in. It
            is left as it was.
        example_input: the model's input, a tensor; or a tuple of positional, or a dict of keyword arguments. All
            tensors that the model returns are pinned, and elements of parameters that it does not use, as positions
            beyond its length. torch.export cannot return a transformer's cache: pass
            `{"input_ids": tokens, "use_cache": False}`.

    Returns:
        The graph, without any tensor of the model.

    Raises:
        TypeError: the model is no module.
        ValueError: torch.export cannot trace the model with `example_input`, or it is lazy or sharded.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from adiv_optim import gauge
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> gauge.trace(model, torch.ones(1, 3)).free
        4
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace: model must be a torch.nn.Module, found {type(model).__name__}.")
    model = unwrapped(model)
    with _attributes_kept(model):
        program = _exported(model, example_input)
    # Operations whose results nothing uses, as those for a log, would pin their inputs; a region may write in place.
    program.graph_module.graph.eliminate_dead_code(lambda node: node.is_impure() or _is_region(node))
    with torch.device("cpu"):  # where ids are, under any default device
        channels = Channels()
        outputs = _Interpreter(program.graph_module, channels).run(*_inputs(program, model))
        _note_reads(channels, outputs)
        Call(None, "output", {"outputs": outputs}, None, "output of the model", channels).pin_all()
        return _graph(channels, [name for name, _ in model.named_parameters()])


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put attributes of modules back: torch.export leaves those that a first call makes, of tensors without numbers."""
    own = [vars(module) for module in model.modules()]
    within = [value for attributes in own for value in attributes.values() if isinstance(value, (dict, set, list))]
    before = [copy.copy(container) for container in (*own, *within)]
    try:
        yield
    finally:
        for container, old in zip((*own, *within), before, strict=True):
            container.clear()
            container.extend(old) if isinstance(container, list) else container.update(old)


def _exported(model: nn.Module, example_input: Any) -> Any:
    """Return the program that torch.export makes of a model; raise as `trace` says."""
    refuse_lazy("trace", model)
    refuse_sharded(
        "trace", model, "trace the model before it is sharded, and pass on the graph: UnitConsistent(…, graph=graph)"
    )
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    keywords = {}
    if isinstance(example_input, Mapping):  # a dict, or a tokenizer's BatchEncoding
        arguments, keywords = (), dict(example_input)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's, about itself
            return torch.export.export(model, arguments, keywords, strict=False)
    except Exception as error:
        leaves = pytree.tree_leaves((arguments, keywords))
        shapes = ", ".join(str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"torch.export cannot trace {type(model).__name__} with an example_input of shape {shapes}, and so its "
            "channels cannot be found; does the model run on it, and return tensors alone (of transformers with "
            f"use_cache=False)? {type(error).__name__}: {first}"
        ) from error


def _inputs(program: Any, model: nn.Module) -> list[Any]:
    """Return the values that a program begins with: of parameters, buffers, and the arguments of the model."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
    buffers = model.named_buffers(remove_duplicate=False)
    trained = dict(model.named_parameters(remove_duplicate=False))
    every: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers()), **program.constants}
    shared = overlaps({name: tensor for name, tensor in every.items() if isinstance(tensor, Tensor)})
    first = dict[int, str]()  # a tied parameter has several names
    names = {name: first.setdefault(id(tensor), name) for name, tensor in itertools.chain(trained.items(), buffers)}
    values = list[Any]()
    for node in program.graph.find_nodes(op="placeholder"):
        spec, fake = specs[node.name], node.meta.get("val")
        if not isinstance(fake, Tensor):
            values.append(fake)
        elif spec.kind is InputKind.PARAMETER and _may_move(trained[spec.target], shared):
            base = torch.empty(fake.shape, device="meta")
            values.append(ParameterView(names[spec.target], base, base))
        else:  # a buffer, a tensor without a name, or a parameter that stays
            values.append(Activation.constant(fake.shape, names.get(spec.target, "")))
    return values


def _may_move(parameter: nn.Parameter, shared: Container[int]) -> bool:
    """Whether it can be rescaled: integers cannot, and memory that two parameters share would be twice."""
    return id(parameter) not in shared and (parameter.is_floating_point() or parameter.is_complex())


def _is_region(node: torch.fx.Node) -> bool:
    """Whether a node is a graph in a context: of `with torch.autocast(…)`, say."""
    return str(node.target).startswith("wrap_with_")


class _Interpreter(torch.fx.Interpreter):
    """Runs a traced graph on channels in place of numbers."""

    def __init__(self, module: torch.fx.GraphModule, channels: Channels) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self.channels = channels

    def run_node(self, node: torch.fx.Node) -> Any:
        if node.op != "call_function" or node.target is operator.getitem:
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if _is_region(node):
            place = next(place for place, value in enumerate(args) if isinstance(value, torch.fx.GraphModule))
            return _Interpreter(args[place], self.channels).run(*args[place + 1 :])
        call = _call(node, args, kwargs, self.channels)
        schema = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else []
        # out= may be a view, whose base would keep its channels.
        has_out = any(argument.kwarg_only and argument.alias_info for argument in schema)
        rule = Call.pin_all if has_out else RULES.get(call.name, Call.pin_all)
        result = rule(call)
        if rule is not batch_norm:
            _note_reads(self.channels, call.arguments)
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in schema)
        if writes and isinstance(node.args[0], torch.fx.Node):
            overwritten, why = self.env[node.args[0]], f"overwritten in place by {call.label}"
            if rule is rearrange:
                self.env[node.args[0]] = result
            elif isinstance(overwritten, Activation):  # joined with the new values, for its views have them too
                self.channels.join(overwritten.channels, call.ids(result), why)
            else:
                call.pin(overwritten, why)
                call.pin(result)
        return result


def _note_reads(channels: Channels, values: Any) -> None:
    """Let buffers stand still that anything but a normalisation reads."""
    for value in pytree.tree_leaves(values):
        if isinstance(value, Activation) and value.buffer:
            still = pinned(len(value.shape))
            channels.record(channels.buffers, value.buffer, Entry(value.shape, still, still))


def _call(node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], channels: Channels) -> Call:
    """Return the call of an operator in a traced graph, with the arguments given for its nodes."""
    modules, output = list((node.meta.get("nn_module_stack") or {}).values()), node.meta.get("val")
    path = modules[-1][0].removeprefix("L['self']").lstrip(".") if modules else ""
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name.removeprefix("aten::")
        arguments = {argument.name: argument.default_value for argument in node.target._schema.arguments}
        arguments |= {**dict(zip(arguments, args, strict=False)), **kwargs}
    else:
        name = getattr(node.target, "__name__", str(node.target))
        arguments = {"args": args, "kwargs": kwargs}
    name = name if name in RULES else name.removesuffix("_")
    label = f"{name} in {path}" if path else name
    shapes = [leaf.shape for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    is_number = isinstance(output, (torch.SymInt, torch.SymFloat, torch.SymBool)) and node.users
    if is_number or not all(isinstance(size, int) for shape in shapes for size in shape):
        raise ValueError(
            f"{label} returns a number, or a tensor whose shape depends on the values of its input; its channels "
            "cannot be followed."
        )
    return Call(node.target, name, arguments, output, label, channels)


def _graph(channels: Channels, names: list[str]) -> ChannelGraph:
    """Number the components that parameters and buffers move by, and return the graph in these numbers."""
    uses = [*channels.parameters.values(), *channels.buffers.values()]
    sides = {use: [channels.compress(side) for side in use.sides] for use in uses}
    used, counted = torch.zeros(2, channels.count, dtype=torch.bool)
    used[PINNED] = counted[PINNED] = True
    for use in uses:
        for side in sides[use]:
            used[side] = True
            counted[side] |= use.counted
    numbers = torch.where(used, used.cumsum(0) - 1, -1)

    def numbered(use: Entry) -> Entry:
        plus, minus = (numbers[side] for side in sides[use])
        if bool(plus.any() or minus.any()):
            # Channels that no weight has, as those of rows of standardised weights, take their scale from other uses.
            is_counted = use.counted or not bool(counted[sides[use][0]].all())
            return replace(use, plus=plus, minus=minus, counted=is_counted, why=())
        reasons = channels.reasons(torch.cat([side.flatten() for side in use.sides]))
        return replace(use, plus=plus, minus=minus, why=(*use.why, *reasons) or ("a constant",))

    return ChannelGraph(
        free=int(used.sum()) - 1,
        parameters={name: numbered(channels.parameters[name]) for name in names if name in channels.parameters},
        buffers={name: replace(numbered(use), counted=False) for name, use in channels.buffers.items()},
        unused=tuple(name for name in names if name not in channels.parameters),
    )
