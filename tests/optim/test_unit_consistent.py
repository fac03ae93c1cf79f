"""UnitConsistent: gauge-equivalent networks follow one path, and everything else an optimizer must keep."""

import copy
import math
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import BatchIdeal, GradientOnly, Proportional, UnitConsistent, gauge
from adiv_optim.optim import diagonal
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired
from tests.helpers.revive import revived

EXACT = 1e-10  # float64, over 100 steps, after mapping back
SIGMA = 1.5


pytestmark = pytest.mark.usefixtures("in_float64")


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 4)
    )


class ConvNet(nn.Module):
    """Residual add, concat, grouped and depthwise convolution, max and average pooling, PReLU, flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.prelu = nn.PReLU(8)
        self.side = nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(12 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        x = x + self.grouped(F.leaky_relu(self.depthwise(x)))
        x = torch.cat([self.prelu(x), F.relu(self.side(x))], 1)
        return self.head(F.avg_pool2d(x, 2).flatten(1))


def resnet() -> nn.Module:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(num_classes=4)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-30  # newer versions of torch refuse 0; added to a variance this is 0
    return model


FAMILIES = {
    "mlp": (mlp, (16, 6)),
    "cnn": (ConvNet, (8, 3, 8, 8)),
    "resnet18": (resnet, (2, 3, 64, 64)),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
}
GAUGES = {"network": gauge.NetworkGauge(), "layer": gauge.LayerGauge()}


def train(model: nn.Module, optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def batches_for(shape: tuple[int, ...], steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64), torch.randint(4, shape[:1], generator=generator))
        for _ in range(steps)
    ]


def twins(family: str) -> tuple[nn.Module, nn.Module, gauge.ChannelGraph, Tensor]:
    """A network, the same in another gauge, the graph and the gauge between them."""
    build, shape = FAMILIES[family]
    torch.manual_seed(0)
    one = build()
    graph = gauge.trace(one, torch.randn(shape))
    log_scales = gauge.random_gauge(graph, SIGMA, generator=torch.Generator().manual_seed(2))
    other = gauge.apply_gauge(copy.deepcopy(one), graph, log_scales)
    return one, other, graph, log_scales


def deviation(one: nn.Module, other: nn.Module, graph: gauge.ChannelGraph, log_scales: Tensor) -> float:
    """Greatest relative deviation of any parameter, the second network mapped back to the first one's gauge."""
    back = gauge.apply_gauge(copy.deepcopy(other), graph, -log_scales)
    mine, theirs = dict(one.named_parameters()), dict(back.named_parameters())
    return max(relative_error(theirs[name].detach(), p.detach()) for name, p in mine.items())


def path_deviation(family: str, build, wrap, steps: int = 100) -> float:
    one, other, graph, log_scales = twins(family)
    shape = FAMILIES[family][1]
    for model in (one, other):
        train(model, wrap(build(model.parameters()), model, graph), batches_for(shape, steps))
    return deviation(one, other, graph, log_scales)


@pytest.mark.parametrize(
    ("family", "name", "rule"),
    [
        *(("mlp", name, rule) for name, rule in zip(OPTIMIZERS, cycle(GAUGES))),
        ("mlp", "sgd", "layer"),
        ("cnn", "adam", "network"),
        ("cnn", "momentum", "layer"),
    ],
)
def test_equivalent_networks_follow_one_path(family, name, rule):
    # The layer gauge's weights are of magnitude 1, so that rates made for the network gauge would be too small to
    # move them; equivalence holds at any.
    found = path_deviation(
        family,
        OPTIMIZERS[name],
        lambda inner, model, graph: UnitConsistent(inner, model, graph=graph, gauge=GAUGES[rule]),
    )
    assert found <= EXACT


@pytest.mark.parametrize(
    ("name", "fan_in", "steps"),
    [
        ("sgd", True, 2),
        ("adamw", False, 2),
        *(pytest.param(name, fan_in, 100, marks=pytest.mark.slow) for name in OPTIMIZERS for fan_in in (True, False)),
    ],
)
def test_equivalent_residual_networks_with_batchnorm_follow_one_path(name, fan_in, steps):
    def build(parameters):
        optimizer = OPTIMIZERS[name](parameters)
        if fan_in:
            # Balanced to magnitude 1, weights are a hundred times what they are at a fan-in of thousands, and the rates
            # above hardly move them. Here they train, four images at a time, and training magnifies rounding: SGD's at
            # 0.01 from 4e-10 after five steps to 0.4 after forty; Adam makes a whole step of a gradient as small as its
            # eps.
            optimizer.param_groups[0]["lr"] /= 100 if name.startswith("adam") else 10
        return optimizer

    rule = gauge.NetworkGauge(fan_in=fan_in)
    found = path_deviation(
        "resnet18", build, lambda inner, model, graph: UnitConsistent(inner, model, graph=graph, gauge=rule), steps
    )
    assert found <= EXACT


@pytest.mark.parametrize(
    ("family", "name", "steps"),
    [("mlp", "sgd", 100), ("mlp", "adam", 100), ("cnn", "sgd", 100), ("resnet18", "sgd", 2)],
)
def test_plain_optimizers_do_not(family, name, steps):
    assert path_deviation(family, OPTIMIZERS[name], lambda inner, model, graph: inner, steps) > 1e-2


def wrapped(build=OPTIMIZERS["adamw"], seed: int = 0, **options):
    torch.manual_seed(seed)
    model = mlp()
    example = torch.randn(2, 6)
    return model, UnitConsistent(build(model.parameters()), model, example_input=example, **options)


BATCHES = batches_for((16, 6), 6)


@paired(
    "dtype rule build",
    {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)},
    GAUGES,
    {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.0, weight_decay=0.1, eps=1e-3),
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


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own affairs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_compiled_mapping_is_the_mapping(dtype, monkeypatch):
    monkeypatch.setattr(diagonal, "_FUSED", 100)
    torch._dynamo.reset()

    def run(compiled: bool, lr: float) -> list[Tensor]:
        torch.manual_seed(0)
        model = ConvNet().to(dtype)
        graph = gauge.trace(model, torch.randn(2, 3, 8, 8).to(dtype))
        gauge.apply_gauge(model, graph, gauge.random_gauge(graph, 1.0, generator=torch.Generator().manual_seed(0)))
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        UnitConsistent(optimizer, model, graph=graph, compile=compiled).step()
        return [tensor.detach() for p in model.parameters() for tensor in (p, p.grad)]

    still, unmapped = run(True, 0.0)[::2], run(False, 0.0)[::2]
    assert all(torch.equal(one, other) for one, other in zip(still, unmapped, strict=True))
    for one, other in zip(run(True, 0.1), run(False, 0.1), strict=True):
        assert relative_error(one, other) <= 16 * torch.finfo(dtype).eps


def test_there_and_back_alone_would_change_bits():
    weight = torch.randn(1000, dtype=torch.float32)
    d = torch.rand(1000, dtype=torch.float32) + 0.5
    assert not torch.equal(weight * (1 / d) * d, weight)


def test_step_is_the_papers_formula():
    model, optimizer = wrapped(lambda p: torch.optim.SGD(p, lr=0.1), gauge=gauge.LayerGauge())
    weights = [layer.weight.detach().clone() for layer in model if isinstance(layer, nn.Linear)]
    x, y = BATCHES[0]
    F.cross_entropy(model(x), y).backward()
    gradients = [layer.weight.grad.clone() for layer in model if isinstance(layer, nn.Linear)]
    optimizer.step()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer, weight, gradient in zip(layers, weights, gradients, strict=True):
        d, _, e = gauge.rz_scaling(weight)
        wanted = weight - 0.1 * d[:, None] ** 2 * gradient * e**2
        assert relative_error(layer.weight.detach(), wanted) <= 1e-12
        assert relative_error(weight - 0.1 * gradient, wanted) > 1e-3
        assert relative_error(layer.weight.grad, gradient) <= 1e-12  # mapped back


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
        assert not torch.equal(model[0].weight, before[0])  # inside, the weights are in canonical coordinates
        raise RuntimeError("planted")

    optimizer.inner.register_step_pre_hook(fail)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = BATCHES[0]
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="planted"):
        optimizer.step()
    assert all(torch.equal(p, saved) for p, saved in zip(model.parameters(), before, strict=True))


class Freeing(torch.optim.SGD):
    """Gives gradients back within its step, as some optimizers do to save memory."""

    def step(self, closure=None):
        super().step()
        self.zero_grad()


def test_gradients_freed_within_the_step():
    model, optimizer = wrapped(lambda p: Freeing(p, lr=0.1))
    plain_model, plain = wrapped(lambda p: torch.optim.SGD(p, lr=0.1))
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


@pytest.mark.parametrize("rule", [Proportional(), BatchIdeal(0.1)], ids=str)
@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
def test_composes_with_corrections(rule, outside):
    def run(by_hand: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp()
        graph = gauge.trace(model, torch.randn(2, 6))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        if by_hand:
            optimizer = UnitConsistent(inner, model, graph=graph)
            corrected = GradientOnly(torch.optim.SGD(model.parameters(), lr=0.0), model, rule)
        elif outside:
            optimizer = GradientOnly(UnitConsistent(inner, model, graph=graph), model, rule)
        else:
            optimizer = UnitConsistent(GradientOnly(inner, model, rule), model, graph=graph)
        for x, y in BATCHES[:3]:
            model.zero_grad() if by_hand else optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if by_hand:
                corrected.step()  # at rate 0: it corrects p.grad and nothing else
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for found, wanted in zip(run(by_hand=False), run(by_hand=True), strict=True):
        assert relative_error(found, wanted) <= 1e-12


def test_projection_keeps_the_function_and_balances_the_weights():
    model, optimizer = wrapped(project=True)
    plain_model, plain = wrapped()
    for net, opt in ((model, optimizer), (plain_model, plain)):
        train(net, opt, BATCHES)
    x = BATCHES[0][0]
    assert relative_error(model(x).detach(), plain_model(x).detach()) <= 1e-9
    assert gauge.network_scales(optimizer.chart.graph, dict(model.named_parameters())).abs().max() <= 1e-9
    assert gauge.network_scales(plain.chart.graph, dict(plain_model.named_parameters())).abs().max() > 1e-3


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


def test_zero_initialised_layer_takes_the_scale_of_its_neighbours():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    nn.init.zeros_(model[2].weight)
    graph = gauge.trace(model, torch.randn(1, 6))
    scales = gauge.network_scales(graph, dict(model.named_parameters()))
    # The hidden units have only their incoming weights to go by: their rows' geometric means, in units of e⁻¹/√6.
    wanted = model[0].weight.detach().abs().log().mean(1) + math.log(6) / 2 + 1
    assert (scales - wanted).abs().max() <= 1e-12
    optimizer = UnitConsistent(torch.optim.SGD(model.parameters(), lr=0.1), model, graph=graph)
    x, y = BATCHES[0]
    F.cross_entropy(model(x), y).backward()
    gradient = model[2].weight.grad.clone()
    optimizer.step()
    assert relative_error(model[2].weight.detach(), -0.1 * gradient * (-2 * wanted).exp()) <= 1e-12
    assert relative_error(-0.1 * gradient, model[2].weight.detach()) > 1e-2


class Proximal(torch.optim.Optimizer):
    """Sets weights, as pruning, clamping and proximal steps do."""

    def __init__(self, parameters, value: float) -> None:
        super().__init__(parameters, {"value": value})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.detach().copy_(torch.where(p.abs() < 1.0, torch.full_like(p, self.param_groups[0]["value"]), p))


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
            r"does not run on an example_input of shape \(1, 5\)",
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
