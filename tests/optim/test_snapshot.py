"""Optimizers whose step does not depend on the weights start from -0, and take the step of those that do not."""

import functools
import itertools
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import InputScaled, UnitConsistent, Whitened, gauge
from adiv_optim.optim.mapped import READ_NO_WEIGHTS, decay_factors
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired
from tests.helpers.gauge_models import mlp
from tests.helpers.optimizers import OPTIMIZERS, Configuration, configurations
from tests.helpers.unit_consistent import BATCHES, train

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12


def steps(configuration: Configuration, weights: list[Tensor], gradients: list[Tensor]) -> tuple[list[Tensor], list]:
    """The weights after as many steps as there are gradients, and each step's c."""
    model = configuration.network()
    for p, value in zip(model.parameters(), weights, strict=True):
        p.data.copy_(value)
    optimizer, factors = configuration.build(model.parameters()), []
    for scale in gradients:
        for p, value in zip(model.parameters(), weights, strict=True):
            p.grad = scale * torch.ones_like(value) + torch.arange(value.numel()).view_as(value) * 1e-2
        known = decay_factors(optimizer)
        factors.append([known.get(id(p)) for p in model.parameters()])
        optimizer.step()
    return [p.detach() for p in model.parameters()], factors


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_free_of_the_weights_where_that_is_claimed(name):
    for configuration in configurations(name):
        torch.manual_seed(0)
        ones = [torch.randn_like(p) for p in configuration.network().parameters()]
        others = [weight + torch.randn_like(weight) for weight in ones]
        gradients = [torch.tensor(scale) for scale in (1.0, -0.5, 0.2)]
        (after, factors), (after_others, _) = (steps(configuration, start, gradients) for start in (ones, others))
        for number, (one, other) in enumerate(zip(ones, others, strict=True)):
            if (first := factors[0][number]) is None:
                continue
            kept = first * factors[1][number] * factors[2][number]
            assert relative_error(after[number] - after_others[number], kept * (one - other)) <= EXACT, configuration


def claimed(optimizer: type, **options: float | Tensor) -> bool:
    weight = nn.Parameter(torch.ones(2, 2))
    return id(weight) in decay_factors(optimizer([weight], **{"lr": 0.1, **options}))


class Reading(torch.optim.SGD):
    """A step that depends on the weights."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad * p.abs().sqrt())


def test_what_reads_the_weights_is_not_claimed():
    assert claimed(torch.optim.SGD)
    assert claimed(torch.optim.AdamW)
    assert claimed(torch.optim.Adam, weight_decay=0.1, decoupled_weight_decay=True)
    assert claimed(torch.optim.AdamW, lr=torch.tensor(0.1))
    assert not claimed(torch.optim.Adam, weight_decay=0.1)
    assert not claimed(torch.optim.Adafactor)
    assert not claimed(Reading)
    weight = nn.Parameter(torch.ones(2))
    elsewhere = torch.optim.AdamW([weight], lr=0.1)
    elsewhere.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")  # which nothing can be read from
    assert not decay_factors(elsewhere)
    patched = torch.optim.SGD([weight], lr=0.1)
    patched.step = lambda: Reading.step(patched)
    assert not decay_factors(patched)
    scheduled = torch.optim.SGD([weight], lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)  # sets a step that counts the calls
    assert decay_factors(scheduled) == {id(weight): 1.0}
    scheduled.step = functools.wraps(scheduled.step)(lambda: Reading.step(scheduled))
    assert not decay_factors(scheduled)


def wrapped(kind, inner: type, **options):
    torch.manual_seed(0)
    model = mlp()
    with torch.no_grad():
        model[0].weight.mul_(30)
        model[2].weight.div_(30)
    optimizer = inner(model.parameters(), **options)
    return model, WRAPPED[kind](optimizer, model, gauge.trace(mlp(), torch.randn(2, 6)))


WRAPPED = {
    "unit-consistent": lambda inner, model, graph: UnitConsistent(inner, model, graph=graph),
    "layer-gauge": lambda inner, model, graph: UnitConsistent(inner, model, graph=graph, gauge=gauge.LayerGauge()),
    "whitened": lambda inner, model, graph: Whitened(inner, model),
    "whitened-rank": lambda inner, model, graph: Whitened(inner, model, rank=3),
    "whitened-plain-norm": lambda inner, model, graph: Whitened(inner, model, graft_norm=False),
    "input-scaled": lambda inner, model, graph: InputScaled(inner, model, floor=0.01),
    "input-scaled-held": lambda inner, model, graph: InputScaled(inner, model, floor=0.01, hold=True),
}
KINDS = {
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.5}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.5}),
    "all-at-once": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.5, "foreach": True}),
}


def path(kind: str, inner: type, options: dict) -> list[Tensor]:
    """The weights after training."""
    model, optimizer = wrapped(kind, inner, **options)
    # At the second step one unit of rounding in the weights is 3e-10 behind Adam, where weights begin from zero.
    once = kind == "whitened-plain-norm" or (kind.startswith("whitened") and issubclass(inner, torch.optim.AdamW))
    train(model, optimizer, BATCHES[: 1 if once else 3])
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("kind", WRAPPED)
def test_steps_from_zero_are_those_of_mapped_weights(kind, inner):
    optimizer, options = KINDS[inner]
    own = type("Own", (optimizer,), {})  # its type says nothing of what it reads
    free = {**options, "weight_decay": 0.0}
    pairs = [(path(kind, own, free), path(kind, optimizer, free))]
    if kind not in ("whitened", "whitened-rank"):  # there an unknown optimizer's decay counts in its step's norm
        pairs.append((path(kind, own, options), path(kind, optimizer, options)))
    for one, two in (weights for pair in pairs for weights in zip(*pair, strict=True)):
        assert relative_error(one, two) <= EXACT


def bits(p: Tensor) -> Tensor:
    return p.detach().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[p.element_size()]).clone()


class Own(torch.optim.SGD):
    """Of a type of its own: it might read the weights, which are mapped."""


@paired(
    "dtype inner",
    {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)},
    {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": partial(torch.optim.AdamW, eps=1e-3), "own": Own},
)
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_rate_of_0_changes_no_bit(kind, dtype, inner):
    """There and back alone would: w · (1 / d) · d is seldom w."""
    model = nn.Sequential(nn.Conv1d(2, 4, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 6), nn.ReLU())
    model = model.append(nn.Linear(6, 4)).double()
    graph = gauge.trace(model, torch.randn(2, 2, 3))
    gauge.apply_gauge(model, graph, gauge.random_gauge(graph, 1.0, generator=torch.Generator().manual_seed(0)))
    model = model.to(dtype)
    with torch.no_grad():
        # Subnormal in its dtype, but where a scale below 1 would take it to 0, on which a step may land.
        model[0].weight[:2, 0, 0] = torch.tensor([1e-30 if kind.startswith("input") else 1e-40, 0.0])
        model[3].weight[0, :3] = torch.tensor([3e-8, -1e-7, -0.0])
    optimizer = WRAPPED[kind](inner(model.parameters(), lr=0.0), model, graph)
    # Entry by entry a -0 that is mapped and read may come back as 0.
    kept = torch.clone if inner is Own and "whitened" not in kind else bits
    before = [kept(p) for p in model.parameters()]
    for size in (0.0, 1.0, 3.0):
        optimizer.zero_grad()
        model(size * torch.randn(5, 2, 3).to(dtype)).square().mean().backward()
        optimizer.step()
        assert all(torch.equal(kept(p), saved) for p, saved in zip(model.parameters(), before, strict=True))
    assert len(optimizer.coverage().treated) >= 2


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_gradient_of_0_changes_no_bit(kind):
    for inner, zero in itertools.product(("momentum", "adamw", "all-at-once"), (0.0, -0.0)):
        optimizer, options = KINDS[inner]
        model, wrapper = wrapped(kind, optimizer, **options | {"weight_decay": 0.0})
        model(3 * torch.randn(9, 6)).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p[0] = -0.0
                p[1] = 5e-324
                p.grad.fill_(zero)
        before = {name: bits(p) for name, p in model.named_parameters()}
        wrapper.step()
        treated = wrapper.coverage().treated  # torch's own step makes +0 of a -0 and a gradient of -0
        assert len(treated) >= 2
        assert all(torch.equal(bits(model.get_parameter(name)), before[name]) for name in treated)


@pytest.mark.parametrize("kind", WRAPPED)
def test_optimizers_that_read_no_weights_find_zeros(kind):
    for inner, is_read in ((torch.optim.SGD, False), (torch.optim.AdamW, False), (Own, True)):
        (model, wrapper), found = wrapped(kind, inner, lr=0.01), list[bool]()
        wrapper.inner.register_step_pre_hook(lambda *_, w=model[0].weight, found=found: found.append(bool(w.any())))
        train(model, wrapper, BATCHES[:1])
        assert found == [is_read]


def test_a_step_that_reads_the_weights_would_be_lost():
    wanted = path("unit-consistent", Reading, {"lr": 0.1})
    READ_NO_WEIGHTS.add(Reading)
    try:
        found = path("unit-consistent", Reading, {"lr": 0.1})
    finally:
        READ_NO_WEIGHTS.discard(Reading)
    assert max(relative_error(one, other) for one, other in zip(found, wanted, strict=True)) > 1e-2


class ByViews(torch.optim.SGD):
    """Steps on views that it has taken of the weights' memory, as optimizers do that join weights."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.views = [p.detach() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for view, p in zip(self.views, self.param_groups[0]["params"], strict=True):
            view.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", WRAPPED)
def test_unknown_optimizers_may_step_on_views_of_the_weights(kind):
    wanted = path(kind, torch.optim.SGD, {"lr": 0.01})
    for one, two in zip(path(kind, ByViews, {"lr": 0.01}), wanted, strict=True):
        assert relative_error(one, two) <= EXACT
