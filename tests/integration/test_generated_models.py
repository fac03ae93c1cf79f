"""The invariants of the package, each on networks that hypothesis makes up."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import SGD, AdamW, Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("hypothesis")

from adiv_optim import (
    BatchIdeal,
    Disproportional,
    Proportional,
    UnitConsistent,
    attach,
    detach,
    gauge,
)
from tests.helpers.cases import apply, relative_error
from tests.helpers.generated import HOMOGENEOUS, Architecture, on_generated_models
from tests.helpers.revive import revived
from tests.wrappers import WRAPPERS

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:UnitConsistent treats"),  # rightly, of tanh
]
LAYERS = (nn.Linear, _ConvNd)
#: Rounding, 1e-16, times what scales that differ by factors of a hundred and a few steps can make of it.
BLIND = 1e-9

CORRECTIONS = {"proportional": Proportional(), "disproportional": Disproportional(), "batch-ideal": BatchIdeal(0.1)}


in_every_wrapper = on_generated_models(*WRAPPERS)
with_every_correction = on_generated_models(*CORRECTIONS)


@cache
def graph_of(architecture: Architecture) -> gauge.ChannelGraph:
    return gauge.trace(architecture.model(), architecture.inputs()[0])


def unit_consistent(inner: Optimizer, model: nn.Module, architecture: Architecture, rule: gauge.Gauge) -> Optimizer:
    # The weights do not matter to the graph, which takes longer to find than a model to train.
    return UnitConsistent(inner, model, gauge=rule, graph=graph_of(replace(architecture, seed=0)))


def wrapped(wrapper: str, architecture: Architecture, seed: int = 0, lr: float = 1e-2) -> Any:
    """The wrapper of an AdamW on the network."""
    model = architecture.model(seed)
    inner = AdamW(model.parameters(), lr=lr, weight_decay=0.1, eps=1e-4)
    if wrapper == "unit-consistent":
        return unit_consistent(inner, model, architecture, gauge.NetworkGauge(every=4))
    return WRAPPERS[wrapper](inner, model, architecture.inputs()[0])


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """A sum over samples, so that those of parts of a batch add up."""
    return distance(model(x))


def distance(output: Tensor, _: Any = None) -> Tensor:
    return (output - torch.linspace(-1, 1, output.shape[-1])).square().sum()


def train(optimizer: Any, model: nn.Module, xs: list[Tensor]) -> list[Tensor]:
    for x in xs:
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def identical(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists agree in every bit: +0 is not -0, and NaN is NaN."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.detach().view(torch.int64), b.detach().view(torch.int64)) for a, b in pairs)


def calls(model: nn.Module, x: Tensor) -> Iterator[tuple[Any, Tensor, Tensor, Tensor]]:
    """Every call of a layer: the layer, its input as a leaf, its output from there, and the loss's gradient there."""
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []
    note = lambda layer, args, output: seen.append((layer, args[0], output))  # noqa: E731
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    total = loss(model, x.clone().requires_grad_())
    for handle in handles:
        handle.remove()
    for (layer, input, _), grad_output in zip(seen, torch.autograd.grad(total, [z for *_, z in seen]), strict=True):
        leaf = input.detach().requires_grad_()
        yield layer, leaf, layer(leaf), grad_output


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor holds that an operation returns."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [value.numel() for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
        self.found = max(self.found, *sizes, 0)
        return result


def largest_tensor(model: nn.Module, x: Tensor) -> int:
    with Largest() as largest:
        loss(model, x).backward()
    return largest.found


def allowance(layer: Any, input: Tensor, output: Tensor) -> int:
    """The largest of the input, X~, G, X~ᵀX~ and the weight, the patches of a convolution being rows."""
    outputs = len(layer.weight)
    rows, columns = output.numel() // outputs, layer.weight[0].numel() * getattr(layer, "groups", 1) + 1
    return max(input.numel(), max(rows, columns) * max(columns, outputs))


# Invariant 1: outside step() the weights are the user's, and inside an exception restores them.


@in_every_wrapper
def test_weights_outside_the_step_are_the_users(wrapper, architecture):
    optimizer, plain = wrapped(wrapper, architecture), architecture.model()
    model, parameters = optimizer.model, list(optimizer.model.parameters())
    assert identical(weights(model), weights(plain))
    for x in architecture.inputs(2):
        train(optimizer, model, [x])
        plain.load_state_dict(model.state_dict())
        assert identical([model(x)], [plain(x)])
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))


@in_every_wrapper
def test_step_without_a_rate_changes_no_bit(wrapper, architecture):
    optimizer = wrapped(wrapper, architecture, lr=0.0)
    before = weights(optimizer.model)
    assert identical(train(optimizer, optimizer.model, architecture.inputs(2)), before)


@in_every_wrapper
def test_exception_within_the_step_restores_the_weights(wrapper, architecture):
    optimizer = wrapped(wrapper, architecture)
    first, second = architecture.inputs(2)
    before = train(optimizer, optimizer.model, [first])
    within = []

    def fail(*_: Any) -> None:
        within.extend(weights(optimizer.model))
        raise RuntimeError("planted")

    optimizer.inner.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        train(optimizer, optimizer.model, [second])
    assert len(within) == len(before)
    assert identical(weights(optimizer.model), before)


# Invariant 2: scales come from activations alone.


@with_every_correction
def test_scaled_loss_gives_scaled_gradients_bit_for_bit(name, architecture):
    model, (x,) = attach(architecture.model(), CORRECTIONS[name]), architecture.inputs()
    loss(model, x).backward()
    once = gradients(model)
    model.zero_grad()
    (1024 * loss(model, x)).backward()
    assert identical([gradient / 1024 for gradient in gradients(model).values()], list(once.values()))


# Invariant 3: a wrapper is the optimizer that it wraps, and goes on exactly from whatever it is brought back by.


@in_every_wrapper
def test_wrapper_is_the_optimizer_it_wraps(wrapper, architecture):
    optimizer, plain = wrapped(wrapper, architecture), architecture.model()
    bare = AdamW(plain.parameters())
    assert isinstance(optimizer, Optimizer)
    for part in ("param_groups", "state", "defaults"):
        assert getattr(optimizer, part) is getattr(optimizer.inner, part)
    train(optimizer, optimizer.model, architecture.inputs())
    train(bare, plain, architecture.inputs())
    for p, q in zip(optimizer.model.parameters(), plain.parameters(), strict=True):
        assert optimizer.state.get(p, {}).keys() == bare.state.get(q, {}).keys()
    assert optimizer.param_groups[0].keys() == bare.param_groups[0].keys()


@in_every_wrapper
def test_checkpoint_copy_and_pickle_go_on_bit_for_bit(wrapper, architecture):
    optimizer, xs = wrapped(wrapper, architecture), architecture.inputs(3)
    train(optimizer, optimizer.model, xs[:2])
    again = revived(optimizer, wrapped(wrapper, architecture, seed=1))
    wanted = train(optimizer, optimizer.model, xs[2:])
    for other in again:
        assert identical(train(other, other.model, xs[2:]), wanted)


# Invariant 4: forward, input gradients and correction=None are torch's, and there are no second derivatives. Parameter
# gradients are held against loops by hand in tests/fuzz.


@on_generated_models()
def test_layers_without_a_correction_are_torchs_bit_for_bit(architecture):
    model, (x,) = architecture.model(), architecture.inputs()
    for layer, input, output, grad_output in calls(model, x):
        found = apply(layer, input, None)
        assert identical([found], [output])
        trained = [p for p in layer.parameters() if p.requires_grad]
        one, other = (torch.autograd.grad(z, [input, *trained], grad_output) for z in (found, output))
        assert identical(list(one), list(other))


@with_every_correction
def test_forward_and_input_gradients_are_those_of_the_plain_model(name, architecture):
    found = []
    for model in (architecture.model(), attach(architecture.model(), CORRECTIONS[name])):
        x = architecture.inputs()[0].requires_grad_()
        output = model(x)
        distance(output).backward()
        found.append([output, x.grad])
    assert identical(*found)


@with_every_correction
def test_detach_gives_back_the_model(name, architecture):
    model, plain, (x,) = architecture.model(), architecture.model(), architecture.inputs()
    loss(attach(model, CORRECTIONS[name]), x).backward()
    model.zero_grad()
    assert detach(model) is model
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        assert type(one) is type(other)
        assert one.__dict__.keys() == other.__dict__.keys()
    loss(model, x).backward()
    loss(plain, x).backward()
    assert identical(list(gradients(model).values()), list(gradients(plain).values()))


@with_every_correction
def test_second_derivative_raises(name, architecture):
    model, (x,) = attach(architecture.model(), CORRECTIONS[name]), architecture.inputs()
    trained = [p for p in model.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss(model, x), trained, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(sum(gradient.sum() for gradient in first), trained)


# Invariant 5: never a tensor of rows × parameters.


@with_every_correction
def test_no_tensor_of_the_backward_holds_rows_times_parameters(name, architecture):
    model, (x,) = architecture.model(), architecture.inputs()
    allowed = max(allowance(*call[:3]) for call in calls(model, x))
    plain = largest_tensor(model, x)
    assert largest_tensor(attach(model, CORRECTIONS[name]), x) <= max(allowed, plain)


# Invariant 6: NaN and inf travel.


@in_every_wrapper
def test_rows_that_are_not_finite_show_in_the_gradients(wrapper, architecture):
    optimizer, plain, (x,) = wrapped(wrapper, architecture), architecture.model(), architecture.inputs()
    for value in (torch.nan, torch.inf):
        x[0] = value
        for model in (optimizer.model, plain):
            model.zero_grad()
            loss(model, x).backward()
        found = gradients(optimizer.model)
        for name, gradient in gradients(plain).items():
            assert gradient.isfinite().all() or not found[name].isfinite().all()


# What the charts are for.

PATHS: dict[str, tuple[Callable[[Any], Optimizer], gauge.Gauge]] = {
    "sgd-network": (lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9), gauge.NetworkGauge()),
    "adamw-layer": (lambda parameters: AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-4), gauge.LayerGauge()),
}


def deviation(architecture: Architecture, build: Callable[[Any], Optimizer], rule: gauge.Gauge | None) -> float:
    """How far the same network in two gauges has come apart after a few steps, mapped back; without a rule, plainly."""
    graph = graph_of(replace(architecture, seed=0))
    log_scales = gauge.random_gauge(graph, generator=torch.Generator().manual_seed(architecture.seed))
    models = [architecture.model(), gauge.apply_gauge(architecture.model(), graph, log_scales)]
    for model in models:
        inner = build(model.parameters())
        train(unit_consistent(inner, model, architecture, rule) if rule else inner, model, architecture.inputs(3))
    gauge.apply_gauge(models[1], graph, -log_scales)
    return max(relative_error(*pair) for pair in zip(*map(weights, models), strict=True))


@on_generated_models(*PATHS, activations=HOMOGENEOUS, count=24)
def test_unit_consistent_path_is_blind_to_the_gauge(path, architecture):
    assert deviation(architecture, *PATHS[path]) <= BLIND
