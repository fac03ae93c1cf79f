"""Two parameters in one memory take the plain step: to map both would map their common elements twice."""

from typing import Any

import pytest
import torch
from torch import nn

from adiv_optim import InputScaled, Preconditioned, UnitConsistent, Whitened
from adiv_optim.rows.models import overlaps
from tests.helpers.steps import inputs, same, sgd, stepped

pytestmark = pytest.mark.usefixtures("in_float64")

WRAPPERS = {
    "whitened": lambda model: Whitened(sgd(model), model),
    "preconditioned": lambda model: Preconditioned(sgd(model), model),
    "input-scaled": lambda model: InputScaled(sgd(model), model, floor=0.1),
    "unit-consistent": lambda model: UnitConsistent(sgd(model), model, example_input=inputs(0)),
}
each = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def autoencoder() -> nn.Sequential:
    """Of 4, 6, 4 and 2 features, with uneven weights, so that every scale is far from 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.mul_(20)
    return model


def tie(model: nn.Sequential) -> None:
    """Let the decoder be a transposed view of the encoder, as `.data` allows."""
    model[2].weight.data = model[0].weight.data.t()


@each
@pytest.mark.filterwarnings("ignore:.*treats less than half")
def test_tied_by_data_they_step_as_with_the_bare_optimizer_and_say_so(wrap: Any):
    model, bare = autoencoder(), autoencoder()
    tie(model)
    tie(bare)
    optimizer = wrap(model)
    for number in range(4):
        stepped(model, optimizer, inputs(number))
        stepped(bare, sgd(bare), inputs(number))
        for place in (0, 2):
            bare_step, step = (network[place].weight.detach().clone() for network in (bare, model))
            assert torch.allclose(step, bare_step, rtol=1e-12, atol=0)
            model.load_state_dict(bare.state_dict())  # the last layer is treated, and takes another step
    coverage = optimizer.coverage()
    assert coverage.skipped["0.weight"] == "it shares its memory with 2.weight"
    assert coverage.skipped["2.weight"] == "it shares its memory with 0.weight"


@each
def test_tied_after_wrapping_they_step_plainly_from_the_next_step_on(wrap: Any):
    model, bare = autoencoder(), autoencoder()
    optimizer = wrap(model)
    stepped(model, optimizer, inputs(0))
    assert "0.weight" in optimizer.coverage().treated
    tie(model)
    bare.load_state_dict(model.state_dict())
    tie(bare)
    stepped(model, optimizer, inputs(1))
    stepped(bare, sgd(bare), inputs(1))
    assert torch.allclose(model[0].weight, bare[0].weight, rtol=1e-12, atol=0)
    assert optimizer.coverage().skipped["0.weight"] == "it shares its memory with 2.weight"


@each
def test_neighbours_in_one_storage_are_treated(wrap: Any):
    """As of libraries that keep all weights in one buffer: no element is in two of them."""
    paths = []
    for flat in (False, True):
        model = autoencoder()
        if flat:
            buffer = torch.cat([p.detach().flatten() for p in model.parameters()])
            for parameter, part in zip(
                model.parameters(), buffer.split([p.numel() for p in model.parameters()]), strict=True
            ):
                parameter.data = part.view(parameter.shape)
        optimizer = wrap(model)
        paths.append(stepped(model, optimizer, *map(inputs, range(3))))
        assert "0.weight" in optimizer.coverage().treated
    assert same(*paths)


def test_ranges_of_addresses_decide():
    """By brute force over elements: contained, crossing, equal and distant ranges; what has no element shares none."""
    memory = torch.arange(40.0)
    views = {
        "all": memory[:20], "within": memory[3:6], "crossing": memory[18:24], "next": memory[24:30],
        "equal": memory[24:30], "alone": memory[30:36], "none": memory[36:36],
    }  # fmt: skip
    parameters = {name: nn.Parameter(view) for name, view in views.items()}
    common = {
        name
        for name, view in views.items()
        for other, another in views.items()
        if name != other and set(view.tolist()) & set(another.tolist())
    }
    reasons = overlaps(parameters)
    assert {name for name, parameter in parameters.items() if id(parameter) in reasons} == common
    assert common == {"all", "within", "crossing", "next", "equal"}


def test_a_layer_whose_weight_is_computed_since_wrapping_is_called_plain_and_so_is_its_bias():
    model = autoencoder()
    optimizer = Whitened(sgd(model), model)
    stepped(model, optimizer, inputs(0))
    nn.utils.parametrize.register_parametrization(model[2], "weight", nn.Tanh())
    stepped(model, optimizer, inputs(1))
    coverage = optimizer.coverage()
    assert {"0.weight", "0.bias"} <= coverage.treated.keys()
    assert coverage.skipped["2.bias"] == "parametrized"
