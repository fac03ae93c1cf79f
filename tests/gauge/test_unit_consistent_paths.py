"""Gauge-equivalent networks follow one path in UnitConsistent, and not without it."""

import copy
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from adiv_optim import UnitConsistent, gauge
from tests.helpers.cases import relative_error
from tests.helpers.gauge_models import Convolutions, mlp, normed
from tests.helpers.unit_consistent import BATCHES, GAUGES, OPTIMIZERS, batches_for, train

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-10  # float64, over forty steps, after mapping back
SIGMA = 1.5


def resnet10() -> nn.Module:
    return normed(ResNet(BasicBlock, [1] * 4, num_classes=4))


FAMILIES = {"mlp": (mlp, (16, 6)), "cnn": (Convolutions, (8, 3, 8, 8)), "resnet10": (resnet10, (2, 3, 64, 64))}


def twins(family: str, unused: bool = False) -> tuple[nn.Module, nn.Module, gauge.ChannelGraph, Tensor]:
    """A network, perhaps with a unit without weights, the same in another gauge, the graph and the gauge between."""
    build, shape = FAMILIES[family]
    torch.manual_seed(0)
    one = build()
    if unused:
        with torch.no_grad():
            one[2].weight[0], one[2].bias[0] = 0, 1
    graph = gauge.trace(one, torch.randn(shape))
    log_scales = gauge.random_gauge(graph, SIGMA, generator=torch.Generator().manual_seed(2))
    other = gauge.apply_gauge(copy.deepcopy(one), graph, log_scales)
    return one, other, graph, log_scales


def deviation(one: nn.Module, other: nn.Module, graph: gauge.ChannelGraph, log_scales: Tensor) -> float:
    """Greatest relative deviation of any parameter, the second network mapped back to the first one's gauge."""
    back = gauge.apply_gauge(copy.deepcopy(other), graph, -log_scales)
    mine, theirs = dict(one.named_parameters()), dict(back.named_parameters())
    return max(relative_error(theirs[name].detach(), p.detach()) for name, p in mine.items())


def path_deviation(family: str, name: str, rule: gauge.NetworkGauge | None, steps: int, unused: bool = False) -> float:
    """How far both come apart, without a rule in the bare optimizer."""
    one, other, graph, log_scales = twins(family, unused)
    for model in (one, other):
        inner = OPTIMIZERS[name](model.parameters())
        optimizer = UnitConsistent(inner, model, graph=graph, gauge=rule) if rule else inner
        train(model, optimizer, batches_for(FAMILIES[family][1], steps))
    return deviation(one, other, graph, log_scales)


@pytest.mark.parametrize(
    ("family", "name", "rule", "steps"),
    [
        *(("mlp", name, rule, 40) for name, rule in zip(OPTIMIZERS, cycle(GAUGES))),
        ("mlp", "sgd", "layer", 40),
        ("cnn", "adam", "network", 40),
        ("cnn", "momentum", "layer", 40),
        # Of a hundred steps, in which weights move by more of their size, training magnifies rounding.
        ("resnet10", "sgd", "network", 2),
    ],
)
def test_equivalent_networks_follow_one_path(family, name, rule, steps):
    # The layer gauge's weights are of magnitude 1, so that rates made for the network gauge would be too small to
    # move them; equivalence holds at any.
    assert path_deviation(family, name, GAUGES[rule], steps) <= EXACT


@pytest.mark.parametrize(
    ("family", "name", "steps"),
    [("mlp", "adam", 100), ("cnn", "sgd", 100), ("resnet10", "sgd", 2)],
)
def test_plain_optimizers_do_not(family, name, steps):
    assert path_deviation(family, name, None, steps) > 1e-2


@pytest.mark.parametrize("rule", GAUGES.values(), ids=GAUGES)
def test_weights_with_zeros_follow_one_path(rule):
    """As `rz_scaling` of each weight by itself would not, whose scales around zeros are by convention."""
    assert path_deviation("mlp", "momentum", rule, 6, unused=True) <= EXACT


def test_a_weight_that_is_frozen_with_a_gradient_left_stays_in_its_units():
    one, other, graph, log_scales = twins("mlp")
    for model in (one, other):
        optimizer = UnitConsistent(OPTIMIZERS["adam"](model.parameters()), model, graph=graph)
        for number, (x, y) in enumerate(BATCHES):
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            model[2].weight.requires_grad_(number < 2)
    assert deviation(one, other, graph, log_scales) <= EXACT
