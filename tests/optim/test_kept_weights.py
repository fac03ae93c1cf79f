"""Optimizers that keep weights are refused; a decoupled decay of torch's own is no part of the step."""

import itertools

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from adiv_optim import ChainedOptimizer, InputScaled, Whitened
from tests.helpers.steps import BY_CLASS, MAPPING, inputs, network, sgd, stepped, weights

pytestmark = pytest.mark.usefixtures("in_float64")


class Plain(Optimizer):
    """Takes the step of SGD; subclasses do more."""

    def __init__(self, parameters, lr=0.1, weight_decay=0.0, **options):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, group, self.state[p])

    def move(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])


class SlowWeights(Plain):
    """Each sixth step goes half of the way back: Ranger."""

    def move(self, p, group, state):
        slow = state.setdefault("slow_weights", p.clone())
        super().move(p, group, state)
        state["step"] = state.get("step", 0) + 1
        if state["step"] % 6 == 0:
            p.copy_(slow.lerp_(p, 0.5))


class SlowWeightsOfOld(Plain):
    """Makes them when it is built."""

    def __init__(self, parameters):
        super().__init__(parameters)
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"exp_avg": torch.zeros_like(p), "slow_weights": p.detach().clone()}


class EstimatedDistance(Plain):
    """Keeps a lower bound of the distance in its group: D-Adaptation."""

    def __init__(self, parameters):
        super().__init__(parameters, d=1e-6, growth_rate=2.0)


class DAdaptLion(Plain):
    """The one of pytorch_optimizer has no growth rate."""

    def __init__(self, parameters):
        super().__init__(parameters, d=1e-6)


KEEPING = {SlowWeightsOfOld: "slow_weights", EstimatedDistance: "d", DAdaptLion: "d"}


@pytest.mark.parametrize("wrap", MAPPING)
@pytest.mark.parametrize("kind", KEEPING)
def test_optimizers_that_keep_weights_are_refused_by_name(kind, wrap):
    model = network()
    message = rf"^{wrap} around {kind.__name__}, whose state holds .* \({KEEPING[kind]}\): .* without {wrap}"
    for inner in (kind(model.parameters()), ChainedOptimizer([sgd(model[0]), kind(model[2].parameters())])):
        with pytest.raises(ValueError, match=message):
            BY_CLASS[wrap](inner, model)


@pytest.mark.parametrize("wrap", MAPPING)
@pytest.mark.parametrize("kind", [SlowWeights, torch.optim.ASGD])
def test_copies_that_the_first_step_makes_are_refused_then_and_nothing_moves(kind, wrap):
    """The first with gradients; and what another optimizer of a chain has moved in it is moved back."""
    model = network()
    optimizer = BY_CLASS[wrap](ChainedOptimizer([sgd(model[0]), kind(model[2].parameters())]), model)
    optimizer.step()
    model(30 * inputs(0)).square().sum().backward()
    before, gradients = weights(model), [p.grad.clone() for p in model.parameters()]
    message = rf"^{wrap} around {kind.__name__}, whose state holds .* \((slow_weights|ax)\)"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            optimizer.step()
    treated = optimizer.coverage().treated
    assert treated
    for (name, p), weight, gradient in zip(model.named_parameters(), before, gradients, strict=True):
        assert torch.equal(p, weight)
        assert name not in treated or torch.equal(p.grad, gradient)


class Masters(Plain):
    """Steps on a copy in float32 of a weight in bfloat16."""

    def move(self, p, group, state):
        state.setdefault("master", p.float()).sub_(p.grad, alpha=group["lr"])
        p.copy_(state["master"])


@pytest.mark.parametrize("wrap", MAPPING)
def test_copies_of_a_higher_precision_are_refused(wrap):
    model = network().bfloat16()
    optimizer = BY_CLASS[wrap](Masters(model.parameters()), model)
    model(30 * inputs(0).bfloat16()).square().sum().backward()
    with pytest.raises(ValueError, match=rf"^{wrap} around Masters, whose state holds .* \(master\)"):
        optimizer.step()


class Counting(Plain):
    """Its state is of whole numbers and of gradients alone: momentum, and zeros as a bias is at first."""

    def move(self, p, group, state):
        state.setdefault("zeros", torch.zeros_like(p))
        super().move(p, group, state)
        state["momentum"] = p.grad.clone()


@pytest.mark.parametrize("wrap", MAPPING)
def test_states_that_are_no_weights_are_none(wrap):
    model = network()
    with torch.no_grad():
        model[0].bias.zero_()
    stepped(model, BY_CLASS[wrap](Counting(model.parameters()), model), inputs(0), inputs(1))
    with torch.no_grad():
        model[2].bias.fill_(0.01)  # as the sizes of the first steps of Rprop are
    stepped(model, BY_CLASS[wrap](torch.optim.Rprop(model.parameters(), lr=0.01), model), inputs(0))


@pytest.mark.parametrize("wrap", ["Preconditioned", "GradientOnly"])
@pytest.mark.parametrize("kind", [*KEEPING, SlowWeights])
def test_they_go_with_wrappers_that_leave_weights_alone(kind, wrap):
    model = network()
    stepped(model, BY_CLASS[wrap](kind(model.parameters()), model), inputs(0))


FUSED = 1 - 0.5 * torch.tensor(0.1, dtype=torch.float32).item()
DECAYS = {
    "adamw": (lambda p: AdamW(p, lr=0.1, weight_decay=0.5), 0.95),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=0.2, weight_decay=0.5, decoupled_weight_decay=True), 0.9),
    "none": (lambda p: SGD(p, lr=0.1), 1.0),
    # Fused kernels multiply in double, whatever the rate is.
    "fused": (lambda p: AdamW(p, torch.tensor(0.1, dtype=torch.float32), weight_decay=0.5, fused=True), FUSED),
}


def ratio(optimizer, layer: nn.Linear) -> torch.Tensor:
    """What a step at a gradient of zero makes of the weight, by entry."""
    x, before = inputs(0, rows=64) * torch.tensor([10.0, 1.0, 1.0, 0.1]) + 3, layer.weight.detach().clone()
    optimizer.zero_grad()
    (0 * layer(x)).sum().backward()
    optimizer.step()
    return layer.weight.detach() / before


def with_bias() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    nn.init.ones_(layer.bias)
    return layer


@pytest.mark.parametrize("wrap", [Whitened, InputScaled])
@pytest.mark.parametrize("name", DECAYS)
def test_a_decoupled_decay_takes_every_weight_to_its_share(name, wrap):
    build, factor = DECAYS[name]
    layer = with_bias()
    optimizer = wrap(build(layer.parameters()), layer)
    found = ratio(optimizer, layer)
    torch.testing.assert_close(found, torch.full_like(found, factor), rtol=1e-12, atol=0)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert torch.equal(ratio(optimizer, layer), torch.ones_like(found))


@pytest.mark.parametrize("pair", itertools.product(DECAYS, repeat=2), ids=lambda pair: " ".join(pair))
def test_weight_and_bias_may_decay_in_two_ways(pair):
    layer = with_bias()
    (of_weight, factor), (of_bias, share) = (DECAYS[name] for name in pair)
    optimizer = Whitened(ChainedOptimizer([of_weight([layer.weight]), of_bias([layer.bias])]), layer, damping=0.01)
    found = ratio(optimizer, layer)
    torch.testing.assert_close(found, torch.full_like(found, factor), rtol=1e-12, atol=0)
    torch.testing.assert_close(layer.bias.detach(), torch.full((3,), share), rtol=1e-12, atol=0)


def test_a_bias_whose_decay_is_part_of_the_gradient_leaves_that_of_the_weight_alone():
    """Decays of 10⁻⁴ move the bias, and with it the weight, by 10⁻⁵ of themselves."""
    layer = with_bias()
    muon, rest = torch.optim.Muon([layer.weight], lr=0.1, weight_decay=0.5), SGD([layer.bias], 0.1, weight_decay=1e-4)
    found = ratio(Whitened(ChainedOptimizer([muon, rest]), layer, damping=0.01), layer)
    torch.testing.assert_close(found, torch.full_like(found, 0.95), rtol=1e-4, atol=0)


class OfItsOwnRate(Plain):
    """Finds its rate itself, as Adafactor does with relative steps."""

    def move(self, p, group, state):
        p.sub_(p.grad, alpha=float(p.square().mean().sqrt()))


@pytest.mark.parametrize("wrap", BY_CLASS)
def test_a_rate_of_none_is_the_optimizers_own(wrap):
    model = network()
    after = stepped(model, BY_CLASS[wrap](OfItsOwnRate(model.parameters(), lr=None), model), inputs(0), inputs(1))
    assert all(
        bool((one != other).any() and one.isfinite().all())
        for one, other in zip(after, weights(network()), strict=True)
    )
