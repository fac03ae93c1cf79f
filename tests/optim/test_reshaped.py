"""Weights whose shapes change under a wrapper, as of a network that is pruned: measured anew, with one warning."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from adiv_optim import InputScaled, Preconditioned, Whitened
from tests.helpers.steps import each_by_inputs, inputs, network, same, sgd, stepped

pytestmark = pytest.mark.usefixtures("in_float64")

KEPT = [0, 2, 3]


def prune(model: nn.Sequential) -> None:
    """Keep three of five hidden units."""
    first, _, last = model
    first.weight.data, first.bias.data, last.weight.data = (
        first.weight.data[KEPT], first.bias.data[KEPT], last.weight.data[:, KEPT]
    )  # fmt: skip
    for p in model.parameters():
        p.grad = None


@each_by_inputs
@pytest.mark.parametrize("every", [1, 7])
def test_the_next_steps_are_those_of_a_new_wrapper(wrapper, every):
    """With every=7 the steps are the first, the second and the third, and the pruned ones begin with a plain one."""
    model = network()
    optimizer = wrapper(sgd(model, lr=0.01), model, every=every, decay=0.0)
    stepped(model, optimizer, *(inputs(seed, size=2.0) for seed in range(3)))
    prune(model)
    twin = copy.deepcopy(model)
    other: Any = wrapper(sgd(twin, lr=0.01), twin, every=1) if every == 1 else sgd(twin, lr=0.01)
    with pytest.warns(UserWarning, match=r"0\.weight from \(5, 4\) to \(3, 4\), 2\.weight from \(3, 5\) to \(3, 3\)"):
        stepped(model, optimizer, inputs(3, size=2.0))
    stepped(twin, other, inputs(3, size=2.0))
    assert same(model.parameters(), twin.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(model, optimizer, inputs(4, size=2.0), inputs(5, size=2.0))  # the next that measure
    assert optimizer.coverage().parameter_share >= 0.5
    assert {"0.weight", "2.weight"} <= optimizer.coverage().treated.keys()


def test_the_size_of_an_entry_is_that_of_the_columns_that_are_left():
    layer, x = nn.Linear(4, 3), torch.tensor([[3.0, 3.0, 0.0, 0.0]])
    optimizer = InputScaled(sgd(layer), layer, every=1, decay=0.0)
    stepped(layer, optimizer, x)
    layer.weight.data = layer.weight.data[:, :2]
    with pytest.warns(UserWarning, match=r"the shapes of weights have changed: weight from \(3, 4\) to \(3, 2\)"):
        stepped(layer, optimizer, x[:, :2])
    assert optimizer.metrics()["InputScaled/weight/input_rms"] == pytest.approx(3)


@pytest.mark.parametrize("wrapper", [Whitened, Preconditioned])
def test_small_layers_that_were_multiplied_together_are_taken_apart(wrapper):
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), inputs(0)
    optimizer = wrapper(sgd(model, lr=0.01), model, every=7)
    stepped(model, optimizer, x, x, x)
    model[1].weight.data, model[1].bias.data = model[1].weight.data[:2], model[1].bias.data[:2]
    model[2].weight.data = model[2].weight.data[:, :2]
    with pytest.warns(UserWarning, match=r"1\.weight from \(4, 4\) to \(2, 4\), 2\.weight"):
        stepped(model, optimizer, x)
    assert list(optimizer.coverage().treated) == ["0.weight", "0.bias"]


def test_a_rank_that_is_too_great_now_is_the_whole():
    layer = nn.Linear(6, 3, bias=False)
    optimizer = Whitened(sgd(layer, lr=0.01), layer, rank=3, every=1)
    stepped(layer, optimizer, inputs(0, features=6))
    layer.weight.data = layer.weight.data[:, :2]
    with pytest.warns(UserWarning, match="measured anew"):
        stepped(layer, optimizer, inputs(1, features=2))
    assert optimizer.coverage().treated == {"weight": "whitened, 2 columns"}
    optimizer.load_state_dict(optimizer.state_dict())


@each_by_inputs
def test_a_weight_that_another_shape_has_replaced_is_no_error_in_the_forward_pass(wrapper):
    model = network()
    optimizer = wrapper(sgd(model, lr=0.01), model, every=1)
    stepped(model, optimizer, inputs(0, size=2.0))
    for name in ("0.weight", "0.bias", "2.weight"):
        layer, kind = model.get_submodule(name[0]), name[2:]
        old = layer.get_parameter(kind).data
        setattr(layer, kind, nn.Parameter(old[:, KEPT] if name == "2.weight" else old[KEPT]))
    with pytest.warns(UserWarning, match="takes plain steps"):
        stepped(model, optimizer, inputs(1, size=2.0))


def test_convolutions_of_fewer_channels_are_measured_anew():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=4)), torch.randn(3, 2, 7, 7)
    optimizer = Whitened(sgd(model, lr=0.01), model, every=1)
    stepped(model, optimizer, x)
    for layer in model:
        layer.weight.data, layer.bias.data = layer.weight.data[KEPT], layer.bias.data[KEPT]
        layer.weight.grad = layer.bias.grad = None
    model[1].groups = 3
    with pytest.warns(UserWarning, match="measured anew"):
        stepped(model, optimizer, x)
    assert optimizer.coverage().parameter_share == 1
