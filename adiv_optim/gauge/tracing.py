"""The channels of a model: torch.export writes its operations down, and the rules say which scales they share."""

import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from .._checks import warn
from ..rows.models import refuse_lazy, refuse_sharded
from .call import Call
from .channels import CONSTANT, PINNED, Activation, Parameter, Use, Uses
from .graph import ChannelGraph, Entry, Node
from .rules import RULES, rearrange


def trace(model: nn.Module, example_input: Any) -> ChannelGraph:
    r"""Find which channels of which layers of a model share a positive scale.

    A network's function does not change when the weights into a hidden channel are multiplied by
    :math:`e^{s}` and those out of it by :math:`e^{-s}`, if the functions between are positively homogeneous,
    f(cx) = c f(x) for c > 0:

    .. math:: W_{oi} \to e^{s_o} W_{oi} e^{-s_i}, \qquad b_o \to e^{s_o} b_o

    Each channel has one log-scale s. Summands share theirs, concatenation and reshaping carry them along, and they
    are pinned to 0 at the model's inputs and outputs and wherever a function is not homogeneous: ReLU6, sigmoid, tanh,
    GELU, SiLU, softmax, the input of LayerNorm, RMSNorm and GroupNorm. The input of BatchNorm and InstanceNorm is free
    (exactly with a negligible eps only; the graph lists the others), and a normaliser's γ makes a new channel of each
    of its elements. In attention queries and keys are pinned and the values pass. Both uses of a tied weight must move
    it alike, else its channels are pinned. An operation without a rule pins all that it touches, with a warning.

    Args:
        model: any module that torch.export can trace, in the mode (training or evaluation) that it will be used in. It
            is left as it was.
        example_input: the model's input, a tensor; or a tuple of positional, or a dict of keyword arguments. All
            tensors that the model returns are pinned; a transformer's cache torch.export does not know how to return:
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
        >>> print(gauge.trace(model, torch.ones(1, 3)))
        node  channels  free  pinned because
        0            4     4
        2            2     0  output of the model
        4 free log-scales
    """
    program = _exported(model, example_input)
    with torch.device("cpu"):  # where channels are under any default
        interpreter = _Interpreter(program, _first_names(model))
        interpreter.run()
        graph = interpreter.graph([name for name, _ in model.named_parameters()])
    if graph.unknown:
        warn(
            f"no scaling rule for {', '.join(graph.unknown)}: the scales of their inputs and outputs are pinned to 1, "
            "which is safe, and leaves those channels' gauge as it is."
        )
    return graph


def _exported(model: nn.Module, example_input: Any) -> Any:
    """Return the program that torch.export makes of a model; raise as `trace` says."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace: model must be a torch.nn.Module, found {type(model).__name__}.")
    refuse_lazy("trace", model)
    refuse_sharded(
        "trace", model, "trace the model before it is sharded, and pass on the graph: UnitConsistent(…, graph=graph)"
    )
    named = isinstance(example_input, Mapping)  # a dict, or a tokenizer's BatchEncoding
    keywords = dict(example_input) if named else {}
    arguments = () if named else example_input if isinstance(example_input, tuple) else (example_input,)
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


#: The operations with a graph of their own that torch.export makes of `with torch.autocast(…)` and checkpointing.
_REGIONS = ("wrap_with_autocast", "wrap_with_set_grad_enabled")


class _Interpreter:
    """Runs a traced graph on channels in place of numbers."""

    def __init__(self, program: Any, names: dict[str, str]) -> None:
        self.module = program.graph_module
        # Operations for a log alone move nothing, and would pin their inputs.
        self.module.graph.eliminate_dead_code()
        self.inputs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
        self.names = names
        self.uses = Uses()
        self.channels = self.uses.channels
        self.unknown: list[str] = []
        self.env: dict[Any, Any] = {}

    def run(self) -> None:
        """Visit every operation once, in order."""
        for value in pytree.tree_leaves(self._visit(self.module, self._input)):
            if isinstance(value, Activation):
                self.channels.pin(value.channels, "output of the model")
            elif isinstance(value, Parameter):
                self.uses.fixed(value, "output of the model")

    def _visit(self, module: Any, given: Callable[[Any], Any]) -> Any:
        output = None
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = given(node)
            elif node.op == "get_attr":
                self.env[node] = getattr(module, node.target)
            elif node.op == "call_function":
                self.env[node] = self._call(node)
            elif node.op == "output":
                output = self._values(node.args[0])
        return output

    def _input(self, node: Any) -> Any:
        spec, fake = self.inputs[node.name], node.meta.get("val")
        if not isinstance(fake, Tensor):
            return fake
        if spec.kind is InputKind.PARAMETER:
            base = torch.empty(fake.shape, device="meta")
            return Parameter(self.names[spec.target], base, base)
        if spec.kind is InputKind.BUFFER:
            return Activation.constant(fake.shape, self.names.get(spec.target, spec.target))
        return Activation.constant(fake.shape)

    def _call(self, node: Any) -> Any:
        if node.target is operator.getitem:
            return self._values(node.args[0])[node.args[1]]
        if str(node.target) in _REGIONS:
            values = iter(self._values(node.args))
            region = next(value for value in values if isinstance(value, torch.fx.GraphModule))
            return self._visit(region, lambda _: next(values))
        stack, output = list((node.meta.get("nn_module_stack") or {}).values()), node.meta.get("val")
        where = stack[-1][0].removeprefix("L['self']").lstrip(".") if stack else ""
        known = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
        name = node.target._schema.name.removeprefix("aten::") if known else str(node.target)
        shapes = [leaf.shape for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            raise ValueError(
                f"{name} in {where or 'the model itself'} returns a tensor whose shape depends on the values of its "
                "input; its channels cannot be followed."
            )
        if known and name not in RULES:
            name = name.removesuffix("_")
        call = Call(node.target, name, self._arguments(node, known), output, where, self.uses)
        rule = RULES.get(name) if known else None
        if rule is None:
            # A function of constants is a constant, whatever it does.
            if not all(map(call.is_constant, call.tensors())):
                self.unknown.append(call.label)
            return call.pin_all(f"no rule for {call.label}")
        result = rule(call)
        if known and node.target._schema.is_mutable and isinstance(node.args[0], torch.fx.Node):
            self._written(node.args[0], result, call, moved=rule is rearrange)
        return result

    def _arguments(self, node: Any, known: bool) -> dict[str, Any]:
        if not known:
            return {str(place): value for place, value in enumerate(self._values([*node.args, *node.kwargs.values()]))}
        schema = node.target._schema.arguments
        given = {**{argument.name: value for argument, value in zip(schema, node.args, strict=False)}, **node.kwargs}
        return {argument.name: self._values(given.get(argument.name, argument.default_value)) for argument in schema}

    def _written(self, target: Any, result: Any, call: Call, moved: bool) -> None:
        """An operation in place: old and new values share scales, so that every view of the tensor still holds."""
        old = self.env[target]
        if moved:
            self.env[target] = result
        elif isinstance(old, Activation):
            self.channels.join(old.channels, result.channels, f"overwritten in place by {call.label}")
        elif isinstance(old, Parameter):
            self.uses.fixed(old, f"overwritten in place by {call.label}")
            call.pin(result)

    def _values(self, tree: Any) -> Any:
        return torch.fx.node.map_arg(tree, lambda node: self.env.get(node))

    def graph(self, order: list[str]) -> ChannelGraph:
        """Number the components that parameters live on, and write every use in those numbers."""
        channels, uses = self.channels, self.uses
        all_uses = [*uses.parameters.values(), *uses.buffers.values()]
        ends = {use: (channels.compress(use.plus), channels.compress(use.minus)) for use in all_uses}

        def ends_of(uses: Iterable[Use]) -> Tensor:
            is_end = torch.zeros(channels.count, dtype=torch.bool)
            for ids in itertools.chain([torch.tensor(PINNED)], *(ends[use] for use in uses)):
                is_end[ids] = True
            return is_end

        used, measured = ends_of(all_uses), ends_of(use for use in all_uses if use.counted)
        numbers = torch.where(used, used.cumsum(0) - 1, -1)

        def entry(use: Use) -> Entry:
            plus, minus = (numbers[ids] for ids in ends[use])
            moves = bool((plus != 0).any() or (minus != 0).any())
            # Channels that no weight touches, as rows of standardised weights, take their scale from their other uses.
            counted = use.counted or not bool(measured[ends[use][0]].all())
            # A constant input is no reason where the output is pinned.
            reasons = () if moves else channels.reasons(torch.cat([use.plus.flatten(), use.minus.flatten()]))
            why = tuple(reason for reason in (use.why, *reasons) if reason not in ("", CONSTANT))
            why = () if moves else why or (CONSTANT,)
            return Entry(use.shape, plus, minus, counted, use.power, moves, use.expected_log_weight, why, use.matrix)

        nodes = []
        for name, ids in channels.made:
            index = numbers[channels.find(ids)]
            if bool((index >= 0).any()):
                nodes.append(Node(name, index.clamp_(min=0), channels.reasons(ids)))
        return ChannelGraph(
            free=int(used.sum()) - 1,
            nodes=tuple(nodes),
            parameters={name: entry(uses.parameters[name]) for name in order if name in uses.parameters},
            buffers={name: replace(entry(use), counted=False) for name, use in uses.buffers.items()},
            outside=tuple(name for name in order if name not in uses.parameters),
            unknown=tuple(dict.fromkeys(self.unknown)),
            inexact=tuple(dict.fromkeys(uses.inexact)),
        )


def _first_names(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to its first, which stands for a tied one."""
    first: dict[int, str] = {}
    kinds = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in itertools.chain(*kinds)}
