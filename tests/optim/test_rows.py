"""Which layers the wrappers of inputs treat, and what they say of the others."""

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Whitened
from adiv_optim.layers import NormLikeLinear
from tests.helpers.cases import relative_error
from tests.helpers.inputs import mean_of
from tests.helpers.steps import backward, each_by_inputs, sgd


class Halved(nn.Linear):
    """Its weight multiplies half of its input, as quantisation-aware layers multiply a rounded one."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input / 2)


class Declared(Halved):
    def input_rows(self, input: Tensor) -> Tensor:
        return input / 2


def test_subclasses_are_left_alone_unless_they_declare_their_rows():
    for layer in (Halved(4, 3), NormLikeLinear(4, 3)):
        model = nn.Sequential(nn.Linear(9, 4), layer)
        optimizer = Whitened(sgd(model), model)
        kind = type(layer).__name__
        assert optimizer.coverage().skipped["1.weight"] == (
            f"{kind} is a subclass of Linear, whose weight may multiply something else"
        )
    declared = Declared(4, 3)
    optimizer, x = Whitened(sgd(declared), declared), torch.randn(7, 4)
    backward(declared, x)
    optimizer.step()
    rows = torch.cat([x / 2, torch.ones(7, 1)], 1)
    assert relative_error(mean_of(optimizer.method.layers[0])[0], rows.T @ rows / 7) <= 1e-6


class Columns(nn.Module):
    """A layer by itself, without a bias, that says what it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T

    def input_rows(self, input: Tensor) -> Tensor:
        return input


def test_a_layer_with_rows_needs_no_bias():
    torch.manual_seed(0)
    layer, x = Columns(), torch.randn(7, 4)
    optimizer = Whitened(sgd(layer), layer)
    backward(layer, x)
    optimizer.step()
    assert relative_error(mean_of(optimizer.method.layers[0])[0], x.T @ x / 7) <= 1e-6


def test_a_frozen_bias_is_said_to_be_frozen():
    layer = nn.Linear(4, 3)
    layer.bias.requires_grad_(False)
    optimizer = Whitened(sgd(layer), layer)
    assert optimizer.coverage().skipped == {"bias": "frozen"}


def test_an_instance_with_a_forward_of_its_own_is_left_alone():
    model = nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 3))
    model[1].forward = lambda input: input[..., :3]
    optimizer = Whitened(sgd(model), model)
    assert optimizer.coverage().skipped["1.weight"] == "this Linear has a forward of its own set on it"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@each_by_inputs
def test_a_layer_without_features_and_bias_is_left_alone(wrapper):
    model = nn.ModuleList([nn.Linear(0, 3, bias=False), nn.Linear(4, 3)])
    optimizer = wrapper(sgd(model), model)
    (model[0](torch.ones(5, 0)) + model[1](torch.ones(5, 4))).square().sum().backward()
    optimizer.step()
    found = optimizer.coverage()
    assert found.skipped["0.weight"] == "without entries"
    assert "1.weight" in found.treated
    assert all(parameter.isfinite().all() for parameter in model.parameters())
