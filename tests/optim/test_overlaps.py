"""Two parameters in one memory take the plain step: to map both would map their common elements twice."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.steps import inputs, same, sgd, stepped
from tests.wrappers import REMEMBERING, WRAPPERS

pytestmark = pytest.mark.usefixtures("in_float64")
each_that_remembers = pytest.mark.parametrize("name", REMEMBERING)


def wrapped(name: str, model: nn.Module) -> Any:
    """The wrapper around SGD, with the weights treated at its first step."""
    options = {"floor": 0.1} if name == "input-scaled" else {}
    return WRAPPERS[name](sgd(model), model, inputs(0), **options)


def autoencoder() -> nn.Sequential:
    """Of 4, 6, 4 and 2 features, with uneven weights, so that every scale is far from 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.mul_(20)
    return model


@each_that_remembers
@pytest.mark.parametrize("since", [0, 1])
@pytest.mark.filterwarnings("ignore:.*treats less than half")
def test_tied_by_data_they_step_as_with_the_bare_optimizer_and_say_so(name: str, since: int):
    """From the start, or from the first step after they were tied."""
    model, bare = autoencoder(), autoencoder()
    optimizer = None if since == 0 else wrapped(name, model)
    for number in range(4):
        if number == since:
            for each in (model, bare):  # the decoder is a transposed view of the encoder, as `.data` allows
                each[2].weight.data = each[0].weight.data.t()
            optimizer = optimizer or wrapped(name, model)
        bare.load_state_dict(model.state_dict())
        stepped(model, optimizer, inputs(number))
        stepped(bare, sgd(bare), inputs(number))
        for place in (0, 2):
            is_plain = torch.allclose(model[place].weight, bare[place].weight, rtol=1e-12, atol=0)
            assert is_plain == (number >= since)
    coverage = optimizer.coverage()
    assert coverage.skipped["0.weight"] == "it shares its memory with 2.weight"
    assert coverage.skipped["2.weight"] == "it shares its memory with 0.weight"


@each_that_remembers
def test_neighbours_in_one_storage_are_treated(name: str):
    """As of libraries that keep all weights in one buffer: no element is in two of them."""
    paths = []
    for flat in (False, True):
        model = autoencoder()
        if flat:
            buffer = nn.utils.parameters_to_vector(model.parameters()).detach()
            nn.utils.vector_to_parameters(buffer, model.parameters())
            assert model[0].bias.untyped_storage().data_ptr() == buffer.data_ptr()
        optimizer = wrapped(name, model)
        paths.append(stepped(model, optimizer, *map(inputs, range(3))))
        assert "0.weight" in optimizer.coverage().treated
    assert same(*paths)
