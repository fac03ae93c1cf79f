"""Parametrized layers are corrected through the parametrization."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from adiv_optim import Proportional, attach, coverage, detach
from tests.functional.test_reference import by_hand
from tests.helpers.cases import relative_error

EXACT = 1e-12  # float64, relative

pytestmark = pytest.mark.usefixtures("in_float64")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, weight):
        return weight * self.gain


def by_own(layer):
    parametrize.register_parametrization(layer, "weight", Scaled())
    return layer


WAYS = {
    "weight-norm": parametrizations.weight_norm,
    "spectral-norm": parametrizations.spectral_norm,
    "own": by_own,
    "two": lambda layer: by_own(parametrizations.weight_norm(layer)),
}
LAYERS = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 3, 4)),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_kind = pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS)


def wanted_gradients(layer, x, g, correction):
    """The corrected gradient of the effective weight, pulled back through the parametrization."""
    weight = layer.weight
    plain = copy.deepcopy(layer)
    for name in list(plain.parametrizations):
        parametrize.remove_parametrizations(plain, name)
    with torch.no_grad():
        plain.weight.copy_(weight)
    effective = by_hand(plain, x, g, correction)
    own = {name: p for name, p in layer.named_parameters() if name.startswith("parametrizations.")}
    pulled = torch.autograd.grad(weight, list(own.values()), effective["weight"])
    return {**dict(zip(own, pulled, strict=True)), "bias": effective["bias"]}


@each_way
@each_kind
@pytest.mark.parametrize("order", ["parametrize-then-attach", "attach-then-parametrize"])
def test_own_parameters_get_the_corrected_gradient_of_the_effective_weight(way, build, shape, order):
    correction = Proportional()
    layer, x = build(), torch.randn(shape)
    # In eval mode spectral_norm's power iteration stands still, so that both computations see one weight.
    if order == "attach-then-parametrize":
        layer = way(attach(layer, correction)).eval()
    else:
        layer = attach(way(layer), correction).eval()
    output = layer(x)
    g = torch.randn_like(output)
    output.backward(g)
    found = {name: p.grad for name, p in layer.named_parameters()}
    if order == "attach-then-parametrize":
        assert set(coverage(layer).treated) == set(found)
    wanted = wanted_gradients(detach(layer), x, g, correction)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert relative_error(found[name], wanted[name]) <= EXACT, name


def test_attached_layer_whose_bias_is_parametrized():
    layer = nn.Linear(5, 3)
    parametrize.register_parametrization(layer, "bias", Scaled())
    attach(layer, Proportional())
    x, g = torch.randn(1, 5), torch.randn(1, 3)
    layer(x).backward(g)
    scaled = g / (x.square().sum() + 1)
    assert relative_error(layer.weight.grad, scaled.mT @ x) <= EXACT
    assert relative_error(layer.parametrizations.bias.original.grad, 1.5 * scaled[0]) <= EXACT


#: Steps of a layer's life, given the way in which its weight is parametrized.
STEPS = {
    "attach": lambda layer, way: attach(layer, Proportional()),
    "detach": lambda layer, way: detach(layer),
    "+weight": lambda layer, way: way(layer),
    "+own": lambda layer, way: by_own(layer),
    "+bias": lambda layer, way: parametrize.register_parametrization(layer, "bias", Scaled()),
    "-weight": lambda layer, way: parametrize.remove_parametrizations(layer, "weight"),
    "-bias": lambda layer, way: parametrize.remove_parametrizations(layer, "bias"),
    "copy": lambda layer, way: copy.deepcopy(layer),
}
LIVES = [
    "+weight attach detach -weight",
    "attach +weight detach -weight",
    "+weight attach -weight detach",
    "attach +weight -weight detach",
    "+weight attach +bias detach -weight -bias",
    "+weight +bias attach -weight detach attach -bias detach",
    "attach +weight detach +bias attach -weight detach -bias",
    "attach +weight +bias detach -weight attach detach",
    "+weight attach copy detach attach +bias copy detach",
    "+weight attach +own detach -weight",
]


@each_way
def test_parametrizations_that_come_and_go_between_attach_and_detach(way):
    """A twin lives without the correction: all but the gradients is the same, and they are, unless attached."""
    x = torch.randn(4, 5)
    for life in LIVES:
        layer, twin = nn.Linear(5, 3), nn.Linear(5, 3)
        twin.load_state_dict(layer.state_dict())
        for step in life.split():
            numbers = torch.get_rng_state()
            layer = STEPS[step](layer, way)
            if step not in ("attach", "detach"):
                torch.set_rng_state(numbers)
                twin = STEPS[step](twin, way)
            assert torch.equal(layer(x), twin(x)), life
            assert list(layer.state_dict()) == list(twin.state_dict()), life
            for each in (layer, twin):
                each.zero_grad()
                each(x).square().sum().backward()
            attached = "CorrectedLinear" in {base.__name__ for base in type(layer).__mro__}
            assert bool(coverage(layer).treated) == attached, life
            same = all(torch.equal(a.grad, b.grad) for a, b in zip(layer.parameters(), twin.parameters(), strict=True))
            assert same != attached, life
            if not attached:
                assert type(layer).__bases__ == type(twin).__bases__, life
                assert layer.__dict__.keys() == twin.__dict__.keys(), life
