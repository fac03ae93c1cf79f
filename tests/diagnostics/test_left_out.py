"""Layers that cannot be measured: left out of the table with the reason, or an error where they were asked for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim.diagnostics import divergence
from tests.helpers.modules import Model


def weighted(compute, rows=1):
    return Model(compute, weight=nn.Parameter(torch.ones(rows, 6)))


def branch(model, x):
    """Decides by what it reads."""
    return x * model.weight if x.mean().item() > 0 else -x * model.weight


def first(layer):
    return Model(lambda model, x: model.head(model.layer(x))[:8], layer=layer, head=nn.Linear(6, 3))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.utils.spectral_norm(nn.Linear(6, 6)), "a hook computes its weight before every call"),
        (weighted(lambda model, x: model.weight * x.mean(), 20), "its rows cannot be differentiated one by one: "),
        (weighted(branch), "its rows cannot be differentiated one by one: "),
    ],
)
def test_one_layer_that_cannot_be_measured_leaves_the_others(layer, reason):
    model, x, y = first(layer), torch.randn(8, 6), torch.randint(3, (8,))
    found = divergence(model, F.cross_entropy, x, y)
    assert found.left_out["layer"].startswith(reason)
    assert list(found.layers) == ["head"]
    with pytest.raises(ValueError, match=rf"layer 'layer' \({type(layer).__name__}\) cannot be measured: {reason[:9]}"):
        divergence(model, F.cross_entropy, x, y, layers=["layer"])


def test_inputs_of_one_number_a_sample_are_measured():
    model = first(weighted(lambda model, x: x[:, None] * model.weight)).double()
    x, y = torch.randn(8).double(), torch.randint(3, (8,))
    found = divergence(model, F.cross_entropy, x, y).layers["layer"]
    assert torch.allclose(found.squared_norm, x.square())


@pytest.mark.parametrize("by", [None, torch.optim.SGD], ids=["gradient", "optimizer"])
def test_complex_layers_are_left_out_and_descend_all_the_same(by):
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64), nn.Linear(3, 2, dtype=torch.complex64))
    x = torch.randn(5, 4, dtype=torch.complex64)
    optimizer = by and by(model.parameters(), lr=0.1)
    found = divergence(model, lambda z, _: z.abs().square().sum(), x, None, optimizer=optimizer)
    assert found.left_out == dict.fromkeys("01", "it computes with complex numbers, whose rows are not measured")
    model(x).abs().square().sum().backward()
    assert found.descent == pytest.approx(sum(p.grad.abs().square().sum().item() for p in model.parameters()), rel=1e-4)
