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
def test_a_checkpoint_of_more_trained_layers_is_refused_and_changes_nothing(wrapper):
    model, optimizer = built(wrapper)
    trained(model, optimizer, range(END))
    later = optimizer.state_dict()
    fresh, other = built(wrapper)
    trained(fresh, other, range(THAWED))
    earlier, twin = other.state_dict(), built(wrapper)
    with pytest.raises(ValueError, match=r"\['state'\]\[0\] has an unknown 'adiv_optim\.inputs\..*leave the names out"):
        other.load_state_dict(later)
    optimizer.load_state_dict(earlier)  # in which the first layer has not trained yet: it begins anew
    assert [name for name, rows in rows_counted(optimizer).items() if rows] == ["2.weight"]
    assert same(trained(*twin, range(END)), trained(fresh, other, range(THAWED, END)))
