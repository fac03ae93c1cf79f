"""Models of timm: their outputs stay what they are, and every layer is trained as by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import gauge
from tests.helpers.by_hand import Call, backward, decays
from tests.helpers.cases import relative_error
from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    METHODS,
    adamw,
    deviation,
    each_method_by_name,
    sgd,
    train,
    weights,
)
from tests.helpers.optimizers import AROUND

timm = pytest.importorskip("timm")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:UnitConsistent treats"),  # rightly, of GELU and LayerNorm
]

each_model = pytest.mark.parametrize("model", ["resnet18", "vit_tiny_patch16_224"])
#: The same code with fewer numbers, so that explicit matrices stay small.
NARROW = {
    "resnet18": {"channels": (8, 8, 16, 16), "stem_width": 8, "zero_init_last": False},
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2},
}
FULL = {"resnet18": {}, "vit_tiny_patch16_224": {"img_size": 32}}


def create(name, options):
    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, num_classes=5, **options[name])


def images(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 32, 32, generator=generator), torch.randint(5, (4,), generator=generator))
        for _ in range(count)
    ]


@each_method_by_name
@each_model
def test_timm_output_and_input_gradient_are_the_bare_models(model, name):
    bare, wrapped = create(model, FULL), create(model, FULL)
    x, y = images(1)[0]
    METHODS[name].wrap(sgd(wrapped), wrapped, x)
    found = []
    for each in (bare, wrapped):
        input = x.clone().requires_grad_()
        output = each(input)
        F.cross_entropy(output, y).backward()
        found.append((output, input.grad, each.state_dict()))
    (output, gradient, state), (wrapped_output, wrapped_gradient, wrapped_state) = found
    assert torch.equal(output, wrapped_output)
    assert torch.equal(gradient, wrapped_gradient)
    assert state.keys() == wrapped_state.keys()
    assert all(torch.equal(value, wrapped_state[key]) for key, value in state.items())


def flat(layer):
    """A convolution as the nn.Linear that it is to its patches; the weights are the same memory."""
    linear = nn.Linear(layer.weight[0].numel(), len(layer.weight), layer.bias is not None)
    for name, p in layer.named_parameters():
        getattr(linear, name).data = p.data.flatten(1) if name == "weight" else p.data
    return linear


def rows(layer, x, g):
    """What the layer reads and the gradient of what it gives, row by row."""
    if isinstance(layer, nn.Conv2d):
        x = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT
        g = g.flatten(2).mT
    return x.flatten(0, -2), g.flatten(0, -2)


def train_by_hand(model, method, data):
    """With the bare optimizer, on rows."""
    layers = {layer: flat(layer) for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    ours = {layer.get_parameter(name): q for layer, linear in layers.items() for name, q in linear.named_parameters()}
    optimizer = adamw(nn.ParameterList(ours.get(p, p) for p in model.parameters()))
    for x, y in data:
        model.zero_grad()
        left, found = decays(optimizer), backward(model, layers, x, y)
        calls = [Call(layers[layer], *rows(layer, x, g), held=True, left=left) for layer, x, g in found]
        for p, q in ours.items():
            q.grad = p.grad.view_as(q)
        with method(calls):
            optimizer.step()


@pytest.mark.parametrize("name", [name for name in AROUND if name != "unit-consistent"])
@each_model
@pytest.mark.usefixtures("in_float64")
def test_timm_trains_as_by_hand(model, name):
    by_hand, wrapped, bare = (create(model, NARROW) for _ in range(3))
    train_by_hand(by_hand, AROUND[name].by_hand(), images(3))
    train(wrapped, AROUND[name].wrap(adamw(wrapped), wrapped), images(3))
    train(bare, adamw(bare), images(3))
    assert deviation(weights(wrapped), weights(by_hand)) <= EXACT
    assert deviation(weights(bare), weights(by_hand)) > DIFFERENT


def gauged_twins(model):
    """Two models of other weights and the same function."""
    one = create(model, NARROW)
    for layer in one.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eps = 1e-30  # all that sees the scale of a channel
    graph = gauge.trace(one, images(1)[0][0])
    two = gauge.apply_gauge(copy.deepcopy(one), graph, gauge.random_gauge(graph, 0.5))
    return one, two


@pytest.mark.parametrize("name", ["unit-consistent"])
@each_model
@pytest.mark.usefixtures("in_float64")
def test_timm_trains_alike_in_every_gauge(model, name):
    x = images(1)[0][0]

    def outputs(wrap):
        twins = gauged_twins(model)
        for twin in twins:
            train(twin, wrap(sgd(twin), twin, x), images(3))
        return [twin(x) for twin in twins]

    assert relative_error(*outputs(METHODS[name].wrap)) <= EXACT
    assert relative_error(*outputs(lambda optimizer, *_: optimizer)) > DIFFERENT
