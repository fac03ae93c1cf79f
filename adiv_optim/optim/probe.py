"""The behaviour of an optimizer towards weights, measured on a copy of it that steps on a weight of a few numbers.

No list of names could have it all: whether the state holds weights, and how the weight decay acts. The copy has the
type, the options and the attributes of the optimizer, and neither its state nor its hooks.
"""

import copy
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from .._linalg.shards import local
from ..attach.coverage import warn
from .chained import ChainedOptimizer
from .wrapper import OptimizerWrapper, without_global_hooks

#: These read their state and the gradient, and a weight where it decays and nowhere else; their state holds no weights.
KNOWN: set[type[Optimizer]] = {optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax}
KNOWN |= {optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Muon}
#: Steps of a copy that is searched for weights: Lookahead writes its slow weights back at each fifth or sixth.
_STEPS = 12
#: Decays that are no part of the gradient: at a gradient of zero w is multiplied by one of these of η and λ.
_DECOUPLED: tuple[Callable[[Any, float], Any], ...] = (
    lambda rate, decay: 1 - rate * decay,
    lambda rate, decay: 1 - decay,
    lambda rate, decay: 1 / (1 + rate * decay),
)


def refuse_unsuitable(name: str, optimizer: Optimizer, maps_weights: bool) -> None:
    """Raise if an optimizer, or one within it, is measured not to go with a wrapper; warn if its averages do not.

    Args:
        name: the wrapper's, which opens the message.
        optimizer: to be wrapped.
        maps_weights: whether it is to step on other variables than the weights.

    Raises:
        TypeError: it differentiates gradients.
        ValueError: its steps depend on weights that it keeps, and weights are to be mapped.
    """
    if isinstance(optimizer, (OptimizerWrapper, ChainedOptimizer)):
        for part in optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer.inner]:
            refuse_unsuitable(name, part, maps_weights)
        return
    own = type(optimizer).__name__
    if type(optimizer) in KNOWN:
        return
    for group, like in _unlike(optimizer):
        try:
            entry, used = weights_kept(optimizer, group, like)
            second_order = getattr(optimizer, "is_second_order", False)  # a word of timm
        except RuntimeError:
            second_order = True
        if second_order:
            raise TypeError(
                f"{name} cannot wrap {own}: it differentiates the gradients again, and those that a wrapper gives it "
                f"have no graph. Use {own} without {name}."
            )
        if not maps_weights or not entry:
            continue
        if used:
            raise ValueError(
                f"{name} around {own}, whose state holds weights or a distance between weights ({entry}): it would mix "
                f"those of one step's variables with another's. Use {own} without {name}, or wrap an optimizer that "
                f"reads p and p.grad alone; a Lookahead goes around it: Lookahead({name}(AdamW(…), model))."
            )
        warn(
            f"{own} keeps a copy of weights in its state, {entry!r}, which is about the variables of {name}: its steps "
            "do not depend on it, and it is no average of the model's weights."
        )
        return


def weights_kept(optimizer: Optimizer, group: Mapping[str, Any], like: Tensor) -> tuple[str, bool]:
    """Search the state of an optimizer for weights; "" if there are none, or if it cannot be copied or stepped.

    Args:
        optimizer: without others in it.
        group: one of its parameter groups.
        like: a parameter of that group; dimensions, dtype and device count.

    Returns:
        The name of an entry that is a copy of weights, and whether steps depend on it.

    Raises:
        RuntimeError: torch's own, where the optimizer differentiates gradients.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> averaging = torch.optim.ASGD([weight])
        >>> weights_kept(averaging, averaging.param_groups[0], weight)
        ('ax', False)
    """
    for begun in (False, True):  # some make their state when they are built, and take none from a step
        try:
            first, second = (_path(optimizer, group, like, begun, alter) for alter in (False, True))
        except Exception as error:
            if "does not require grad" in str(error):
                raise
            continue
        if first.changed and "d" in group:  # of D-Adaptation and those that follow it; others may call a setting so
            return "d, an estimate of the distance to go", True
        used = (first.weights, first.changed) != (second.weights, second.changed)
        return (first.names[0], used) if first.names else ("", False)
    return "", False


def decoupled_decay(optimizer: Optimizer, group: Mapping[str, Any], like: Tensor) -> Callable[[Any, float], Any] | None:
    """Return c(η, λ) of w ← c w at a gradient of zero, or None where the decay is part of the gradient, or not known.

    With momentum the two differ: a decay that is part of the gradient is felt again in later steps.
    """
    options = {"weight_decay": 0.5, **({"momentum": 0.9} if group.get("momentum") == 0 else {})}
    rates, ratios = [0.1, 0.1, 0.02], list[Tensor]()
    try:
        with _apart(like):
            copied, weight = _on_few_numbers(optimizer, group, like, torch.float32, options)
            for rate in rates:
                if group.get("lr") is not None:
                    copied.param_groups[0]["lr"] = rate
                before, weight.grad = weight.detach().clone(), torch.zeros_like(weight)
                copied.step()
                ratios.append(weight.detach() / before)
    except Exception:
        return None
    if bool((ratios[0] == 1).all()):  # SOAP prepares in its first step, and moves nothing
        rates, ratios = rates[1:], ratios[1:]
    for factor in _DECOUPLED[1:2] if group.get("lr") is None else _DECOUPLED:
        errors = [(ratio / factor(rate, 0.5) - 1).abs().max() for rate, ratio in zip(rates, ratios, strict=True)]
        if float(max(errors)) < 1e-5:
            return factor
    return None


def kind_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key of the ways that an optimizer may take: flags count, and not numbers, which change."""
    return group.get("lr") is None, *[value for value in group.values() if isinstance(value, (bool, str))]


def _unlike(optimizer: Optimizer) -> list[tuple[Mapping[str, Any], Tensor]]:
    """One parameter of each kind, with its group."""
    pairs = ((group, p) for group in optimizer.param_groups for p in group["params"])
    return list({(kind_of(group), p.ndim, p.dtype): (group, p) for group, p in pairs}.values())


class _Path(NamedTuple):
    """Steps of a copy: the names of copies of weights, the weights, and the numbers in the group that changed."""

    names: list[str]
    weights: list[Any]
    changed: dict[str, float]


def _path(optimizer: Optimizer, group: Mapping[str, Any], like: Tensor, begun: bool, alter: bool) -> _Path:
    """Let a copy take steps, with the state that there is or without, and may be alter copies of weights in it."""
    names: list[str] = []
    with _apart(like):
        copied, weight = _on_few_numbers(optimizer, group, like, like.dtype, {})
        if begun:
            state = optimizer.state.get(like, {})
            copied.state[weight] = copy.deepcopy(state, _shrunk(state, [like], weight))
        seen, draw, before = [weight.detach().clone()], torch.Generator().manual_seed(1), _numbers(copied)
        for _ in range(_STEPS):
            weight.grad = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(weight)
            copied.step()
            seen.append(weight.detach().clone())
            values = torch.stack(seen).flatten().double()
            for name, tensor in _tensors(vars(copied), weight):
                if _are_among(tensor, values):
                    names.append(name)
                    if alter:
                        tensor.detach().mul_(2)
    return _Path(names, torch.stack(seen).tolist(), {n: v for n, v in _numbers(copied).items() if v != before.get(n)})


@contextmanager
def _apart(like: Tensor) -> Iterator[None]:
    """Let nothing outside notice: random numbers, hooks, warnings, compiled functions."""
    devices = [like.device] if like.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(),
        without_global_hooks(),
    ):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        yield


def _on_few_numbers(
    optimizer: Optimizer, group: Mapping[str, Any], like: Tensor, dtype: torch.dtype, options: Mapping[str, Any]
) -> tuple[Optimizer, nn.Parameter]:
    """A copy, and the weight that it steps on, which stands for all parameters wherever the optimizer has them."""
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise TypeError(f"{type(optimizer).__name__} holds an optimizer, with a state of its own")
    shape = [3 - place % 2 for place in range(like.ndim or 1)]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = nn.Parameter(values.to("cpu" if like.is_meta else like.device, dtype))
    copied: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): copied}
    # Torch's schedulers set a step on the instance, which is that of the optimizer itself.
    left = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "step")}
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    memo |= _shrunk([left, group], parameters, weight) | {id(p): weight for p in parameters}
    attributes = copy.deepcopy({name: value for name, value in left.items() if not name.endswith("_hooks")}, memo)
    rate = {} if group.get("lr") is None else {"lr": 0.1}
    alone = copy.deepcopy({name: value for name, value in group.items() if name != "params"}, memo)
    groups = [{**alone, "params": [weight], **rate, **options}]
    Optimizer.__setstate__(copied, {**attributes, "state": defaultdict(dict), "param_groups": groups})
    return copied, weight


def _numbers(optimizer: Optimizer) -> dict[str, float]:
    group = optimizer.param_groups[0]
    return {n: float(v) for n, v in group.items() if isinstance(v, float) or (isinstance(v, Tensor) and v.numel() == 1)}


def _shrunk(tensors: Any, parameters: Sequence[Tensor], weight: Tensor) -> dict[int, Tensor]:
    """By ids, tensors of few numbers for such of a parameter's shape: views and copies of it, or the first number."""
    found: dict[int, Tensor] = {}
    for _, tensor in _tensors(tensors, weight):
        like, part = [local(p) for p in parameters if p.shape == tensor.shape], local(tensor)
        if any(_storage(p) == _storage(part) for p in like):
            found[id(tensor)] = weight.detach()
        elif any(p.shape == part.shape and torch.equal(p, part) for p in like):
            found[id(tensor)] = weight.detach().clone()
        elif like and part.numel():
            found[id(tensor)] = torch.full_like(weight, float(part.flatten()[0]), dtype=tensor.dtype)
    return found


def _storage(tensor: Tensor) -> int:
    """Where the memory of a tensor is, of a sharded one that of the part here."""
    return local(tensor).untyped_storage().data_ptr()


def _tensors(value: Any, weight: Tensor, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors within dicts and sequences, but views of the weight, each by the innermost name on the way there."""
    if isinstance(value, Tensor):
        if _storage(value) != _storage(weight):
            yield name, value
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _tensors(inside, weight, key if isinstance(key, str) else name)
    elif isinstance(value, (list, tuple, deque)):
        for inside in value:
            yield from _tensors(inside, weight, name)


def _are_among(tensor: Tensor, values: Tensor) -> bool:
    """Whether every number that is not whole is one of the values: copies may be flat, cut or of another dtype."""
    if not tensor.is_floating_point() or not tensor.ndim:
        return False
    numbers = tensor.detach().flatten().double()
    numbers = numbers[numbers != numbers.round()][:, None]
    return len(numbers) > 0 and bool(((numbers - values).abs().amin(1) <= 1e-6 * numbers.abs().squeeze(1)).all())
