"""Layers that come after GradientOnly: corrected from the moment in which their parameters are added."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD

from adiv_optim import Disproportional, GradientOnly, Proportional, attach
from adiv_optim.rows.layers import Corrected

pytestmark = pytest.mark.usefixtures("in_float64")


def grown(**options):
    """A wrapper of a model to which a layer has come since."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = GradientOnly(SGD(model.parameters(), lr=0.1), model, Proportional(), **options)
    model.append(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)))
    return model, optimizer


def corrected(model):
    return [name for name, layer in model.named_modules() if isinstance(layer, Corrected)]


def gradients(model):
    model.zero_grad()
    model(torch.arange(24.0).view(6, 4).sin()).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("bring", [lambda o: o, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_gradients_are_those_of_a_model_attached_whole(bring):
    optimizer = bring(grown()[1])
    model = optimizer.model
    before = gradients(model)
    optimizer.add_param_group({"params": model[3].parameters()})
    assert corrected(model) == ["0", "2", "3.1"]
    twin = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)))
    twin.load_state_dict(model.state_dict())
    wanted = gradients(attach(twin, Proportional()))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), wanted, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, wanted, strict=True))  # it did not come by itself


def test_only_layers_whose_parameters_are_added():
    model, optimizer = grown()
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": [model[4].bias]})
    assert corrected(model) == ["0", "2", "4"]


@pytest.mark.parametrize("entry", ["3.1", nn.Linear], ids=["path", "type"])
def test_what_is_skipped_stays_plain(entry):
    model = nn.Sequential(nn.Conv1d(4, 5, 1), nn.Flatten(), nn.Linear(5, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    optimizer = GradientOnly(SGD(model.parameters(), lr=0.1), model, Proportional(), skip=(each for each in [entry]))
    model[3] = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))
    there = corrected(model)
    optimizer.add_param_group({"params": model[3].parameters()})
    assert corrected(model) == there
    del model[3]
    model.append(nn.Conv1d(1, 1, 1))  # what was skipped may be gone
    optimizer.add_param_group({"params": model[3].parameters()})
    assert corrected(model) == [*there, "3"]


def test_the_only_layer_may_be_replaced():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = GradientOnly(SGD(model.parameters(), lr=0.1), model, Proportional())
    model[1] = nn.Linear(4, 3)
    optimizer.add_param_group({"params": model[1].parameters()})
    assert corrected(model) == ["1"]


def test_detached_it_adds_parameters_alone():
    model, optimizer = grown()
    optimizer.detach()
    attach(model[0], Disproportional())  # another rule is none of its own
    optimizer.add_param_group({"params": model[3].parameters()})
    assert corrected(model) == ["0"]


def test_strict_refuses_what_would_stay_plain_and_leaves_the_layers_as_they_were():
    model, optimizer = grown(strict=True)
    with pytest.raises(ValueError, match=r"strict: 2 trainable .* plain gradient: 3\.0\.weight \(LayerNorm is not"):
        optimizer.add_param_group({"params": model[3].parameters()})
    assert corrected(model) == ["0", "2"]
