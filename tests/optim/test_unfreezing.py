"""Layers that are frozen or unfrozen as training goes on: found at the next measurement, and named in checkpoints."""

from typing import Any

import pytest
from torch import Tensor, nn

from tests.helpers.remembered import rows_counted
from tests.helpers.steps import each_by_inputs, inputs, network, same, sgd, stepped, weights

pytestmark = pytest.mark.usefixtures("in_float64")

#: The step from which on the first layer trains.
THAWED, END = 4, 12


def built(wrapper: Any) -> tuple[nn.Module, Any]:
    model = network()
    model[0].requires_grad_(False)
    return model, wrapper(sgd(model, momentum=0.9), model, every=2)


def trained(model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    for step in steps:
        model[0].requires_grad_(step >= THAWED)
        stepped(model, optimizer, inputs(step, size=3.0))
    return weights(model)


@each_by_inputs
def test_a_layer_is_treated_from_the_measurement_after_it_was_unfrozen(wrapper):
    model, optimizer = built(wrapper)
    trained(model, optimizer, range(THAWED))
    assert optimizer.coverage().skipped["0.weight"] == "frozen"
    assert rows_counted(optimizer).keys() == {"2.weight"}
    trained(model, optimizer, range(THAWED, END))
    assert "0.weight" in optimizer.coverage().treated
    rows = rows_counted(optimizer)
    assert 0 < rows["0.weight"] < rows["2.weight"]  # which keeps its average


@each_by_inputs
@pytest.mark.parametrize("at", [THAWED - 1, THAWED + 4])
def test_a_run_goes_on_as_if_it_had_not_been_saved(wrapper, at):
    """Where the script lets the same parameters train before it builds the optimizer that loads."""
    plain = trained(*built(wrapper), range(END))
    model, optimizer = built(wrapper)
    trained(model, optimizer, range(at))
    resumed, _ = built(wrapper)
    resumed[0].requires_grad_(at >= THAWED)
    twin = wrapper(sgd(resumed, momentum=0.9), resumed, every=2)
    resumed.load_state_dict(model.state_dict())
    twin.load_state_dict(optimizer.state_dict())
    assert same(trained(resumed, twin, range(at, END)), plain)


@each_by_inputs
def test_a_checkpoint_of_more_trained_layers_loads_while_they_are_frozen(wrapper):
    """As trainers do, which load before the callback that unfreezes."""
    plain = trained(*built(wrapper), range(END))
    model, optimizer = built(wrapper)
    trained(model, optimizer, range(THAWED + 4))
    fresh, other = built(wrapper)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert other.coverage().skipped["0.weight"] == "frozen"
    assert rows_counted(other) == rows_counted(optimizer)
    assert same(trained(fresh, other, range(THAWED + 4, END)), plain)
    earlier, twin = built(wrapper)[1].state_dict(), built(wrapper)
    optimizer.load_state_dict(earlier)
    assert not any(rows_counted(optimizer).values())
    assert "0.weight" not in rows_counted(twin[1])  # one that has never trained takes no memory


@each_by_inputs
def test_layers_that_train_in_turns_are_treated_in_every_step(wrapper):
    """As adapters do that are switched; a layer that is frozen keeps its measurements, and adds none."""
    model = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)])
    optimizer = wrapper(sgd(model), model, every=3)
    for step in range(12):
        for number, layer in enumerate(model):
            layer.requires_grad_(number == step % 2)
        before = rows_counted(optimizer)
        optimizer.zero_grad()
        sum(layer(inputs(step, features=6)) for layer in model).square().sum().backward()
        optimizer.step()
        now, frozen = f"{step % 2}.weight", f"{1 - step % 2}.weight"
        if step > 1:
            assert now in optimizer.coverage().treated
            assert rows_counted(optimizer)[frozen] == before[frozen]
        assert optimizer.coverage().skipped[frozen] == "frozen"


@each_by_inputs
def test_a_checkpoint_of_a_frozen_layer_goes_on_where_it_trains(wrapper):
    saved, loaded = network(), network()
    saved[0].requires_grad_(False)
    optimizer, other = wrapper(sgd(saved), saved), wrapper(sgd(loaded), loaded)
    stepped(saved, optimizer, inputs(0), inputs(1))
    other.load_state_dict(optimizer.state_dict())
    assert rows_counted(other) == {"0.weight": 0, **rows_counted(optimizer)}
    stepped(loaded, other, *map(inputs, range(8)))
    assert "0.weight" in other.coverage().treated
