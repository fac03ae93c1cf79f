"""UnitConsistent: everything that an optimizer must keep."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import UnitConsistent, gauge
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired
from tests.helpers.proximal import Proximal
from tests.helpers.revive import revived
from tests.helpers.unit_consistent import BATCHES, GAUGES, mlp, train, wrapped

pytestmark = pytest.mark.usefixtures("in_float64")


class Unknown(torch.optim.SGD):
    """Of a type of its own: it might read the weights, which are mapped."""


@paired(
    "dtype rule build",
    {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)},
    GAUGES,
    {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.0, weight_decay=0.1, eps=1e-3),
        "unknown": lambda p: Unknown(p, lr=0.0, momentum=0.9),
    },
)
def test_step_without_a_rate_changes_no_bit(build, rule, dtype):
    torch.manual_seed(0)
    model = mlp().to(dtype)
    graph = gauge.trace(model, torch.randn(2, 6).to(dtype))
    gauge.apply_gauge(model, graph, gauge.random_gauge(graph, 1.0, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        model[0].weight[0, :3] = torch.tensor([1e-40, -1e-7, 3e-8])  # subnormal in their dtypes
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = UnitConsistent(build(model.parameters()), model, graph=graph, gauge=rule)
    for scale in (0.0, 1.0):
        for p in model.parameters():
            p.grad = scale * torch.randn_like(p)
        optimizer.step()
        for p, saved in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, saved)


def test_there_and_back_alone_would_change_bits():
    weight = torch.randn(1000, dtype=torch.float32)
    d = torch.rand(1000, dtype=torch.float32) + 0.5
    assert not torch.equal(weight * (1 / d) * d, weight)


@pytest.mark.parametrize("every", [1, 4])
def test_resume_and_copies_are_bit_exact(every):
    def after(optimizer, model, batches):
        train(model, optimizer, batches)
        return [p.detach().clone() for p in model.parameters()]

    options = {"gauge": gauge.NetworkGauge(every=every)}
    model, optimizer = wrapped(**options)
    whole = after(optimizer, model, BATCHES)
    model, optimizer = wrapped(**options)
    train(model, optimizer, BATCHES[:3])
    for again in (*revived(optimizer, wrapped(seed=1, **options)[1]), optimizer):
        found = after(again, again.model, BATCHES[3:])
        assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))


def test_exception_inside_the_step_leaves_the_weights():
    model, optimizer = wrapped()

    def fail(*_):
        assert not torch.equal(model[0].weight, before[0])  # inside, the weights are canonical
        raise RuntimeError("planted")

    optimizer.inner.register_step_pre_hook(fail)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = BATCHES[0]
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="planted"):
        optimizer.step()
    assert all(torch.equal(p, saved) for p, saved in zip(model.parameters(), before, strict=True))


class Freeing(Unknown):
    """Gives gradients back within its step, as some optimizers do to save memory."""

    def step(self, closure=None):
        super().step()
        self.zero_grad()


def test_gradients_freed_within_the_step():
    model, optimizer = wrapped(lambda p: Freeing(p, lr=0.1))
    plain_model, plain = wrapped(lambda p: Unknown(p, lr=0.1))
    for net, opt in ((model, optimizer), (plain_model, plain)):
        train(net, opt, BATCHES[:2])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain_model.parameters(), strict=True))
    assert model[0].weight.grad is None


def test_model_may_change_its_dtype():
    model, optimizer = wrapped(lambda p: torch.optim.SGD(p, lr=0.0))
    for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.float64):
        model.to(dtype)
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert all(torch.equal(p, saved) for p, saved in zip(model.parameters(), before, strict=True))


def test_scheduler_changes_the_rate_that_is_applied():
    moved = []
    for decay in (1.0, 0.5):
        model, optimizer = wrapped(lambda p: torch.optim.SGD(p, lr=0.1))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=decay)
        optimizer.step()
        schedule.step()
        before = model[0].weight.detach().clone()
        train(model, optimizer, BATCHES[:1])
        moved.append(model[0].weight.detach() - before)
    assert relative_error(moved[1], moved[0] / 2) <= 1e-9


def test_grad_scaler_skips_a_step_with_inf():
    model, optimizer = wrapped()
    scaler = torch.amp.GradScaler("cpu")
    before = model[0].weight.detach().clone()
    x, y = BATCHES[0]
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    model[0].weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model[0].weight, before)
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    unscaled_model, unscaled = wrapped()
    train(unscaled_model, unscaled, BATCHES[:1])
    assert relative_error(model[0].weight.detach(), unscaled_model[0].weight.detach()) <= 1e-9


def test_parameters_outside_the_graph_take_the_plain_step():
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "outside": nn.Linear(3, 2)})
    model.forward = lambda x: model["used"](x)
    with pytest.warns(UserWarning, match="not used by the traced call"):
        optimizer = UnitConsistent(torch.optim.SGD(model.parameters(), lr=0.5), model, example_input=torch.randn(1, 3))
    weight = model["outside"].weight
    before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weight, before - 0.5)


def test_weights_of_another_optimizer_are_left_to_it():
    torch.manual_seed(0)
    model = mlp()
    model[0].weight.data.mul_(30)
    seen = []
    optimizer = UnitConsistent(torch.optim.SGD(model[0].parameters(), lr=0.1), model, example_input=torch.randn(2, 6))
    optimizer.inner.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model[2].parameters()))
    F.cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
    wanted = [p.grad.clone() for p in model[2].parameters()]
    optimizer.step()
    assert len(optimizer.method._factors) > len(optimizer.coverage().treated) > 0
    assert all(torch.equal(one, two) for one, two in zip(seen, wanted, strict=True))


def poisoned(value: float):
    model, optimizer = wrapped()
    with torch.no_grad():
        model[2].weight[1, 1] = value
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model, optimizer


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_without_magnitude_are_refused_and_left(value):
    model, optimizer = poisoned(value)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'2.weight' holds (NaN|inf)"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) or "2.weight" in name for name, p in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@paired("value sigma", {"zero": 0.0, "minus-zero": -0.0, "inf": torch.inf, "nan": torch.nan}, {"0.5": 0.5, "3": 3.0})
def test_step_may_land_on_zero_or_infinity(value, dtype, sigma):
    torch.manual_seed(0)
    model = mlp().to(dtype)
    graph = gauge.trace(model, torch.randn(2, 6).to(dtype))
    gauge.apply_gauge(model, graph, gauge.random_gauge(graph, sigma, generator=torch.Generator().manual_seed(0)))
    before = copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    UnitConsistent(Proximal(model.parameters(), value), model, graph=graph).step()
    for p, saved in zip(model.parameters(), before.parameters(), strict=True):
        same = p == saved
        wanted = torch.full_like(p, value)
        landed = p.isnan() if value != value else p == wanted
        assert bool((same | landed).all())
        assert bool(landed.any())


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda: UnitConsistent(torch.optim.SGD(mlp().parameters(), lr=1.0), mlp()), ValueError, "pass example_input"),
        (
            lambda: wrapped(gauge="network"),
            TypeError,
            "gauge is 'network'; pass gauge.NetworkGauge",
        ),
        (lambda: gauge.NetworkGauge(every=0), ValueError, "NetworkGauge: every is 0"),
        (
            lambda: UnitConsistent(
                torch.optim.SGD((m := mlp()).parameters(), lr=1.0), m, example_input=torch.ones(1, 5)
            ),
            ValueError,
            r"cannot trace .* with an example_input of shape \(1, 5\)",
        ),
        (
            lambda: UnitConsistent(torch.optim.LBFGS((m := mlp()).parameters()), m, example_input=torch.ones(1, 6)),
            TypeError,
            "cannot wrap LBFGS",
        ),
    ],
)
def test_mistakes_are_named(action, error, message):
    with pytest.raises(error, match=message):
        action()
