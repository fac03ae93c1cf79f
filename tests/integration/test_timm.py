"""Models of timm: their outputs stay what they are, and every layer is trained as by hand."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from adiv_optim import gauge
from tests.fuzz.compare import drawn, path_deviation
from tests.fuzz.trainings import Training
from tests.helpers.cases import relative_error
from tests.helpers.loops import DIFFERENT, EXACT, METHODS, sgd, train
from tests.wrappers import WRAPPERS

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


def create(name):
    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, num_classes=5, **NARROW[name])


def images(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 32, 32, generator=generator), torch.randint(5, (4,), generator=generator))
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "unit-consistent"])
@each_model
@pytest.mark.usefixtures("in_float64")
def test_timm_trains_as_by_hand(model, name):
    net, inputs = create(model), [x for x, _ in images(3)]
    names = [path for path, _ in net.named_parameters()]
    training = Training(
        inputs, [torch.randn(4, 5) for _ in inputs], 1, False, [names], [(1e-2, 0.01)], partial(AdamW, eps=1e-3)
    )
    settings = drawn(name, 0) | {"damping": 1.0, "max_dim": None}
    settings = {key: value for key, value in settings.items() if key in drawn(name, 0)}
    assert path_deviation(name, net, training, settings) <= EXACT


def gauged_twins(model):
    """Two models of other weights and the same function."""
    one = create(model)
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
