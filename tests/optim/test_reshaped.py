"""Weights whose shapes change under a wrapper, as of a network that is pruned, are refused at the step."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.helpers.remembered import rows_counted
from tests.helpers.steps import each_by_inputs, inputs, network, sgd, stepped, weights

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
def test_a_pruned_layer_is_refused_at_the_step_and_taken_by_another_wrapper(wrapper, every):
    """Whether the step measures, every=1, or does not: the forward pass is no error."""
    model = network()
    optimizer = wrapper(sgd(model, lr=0.01), model, every=every)
    stepped(model, optimizer, *(inputs(seed, size=2.0) for seed in range(3)))
    prune(model)
    before = weights(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'0\.weight' has changed from \(5, 4\) to \(3, 4\), .* wrap again"):
            stepped(model, optimizer, inputs(3, size=2.0))
    assert all(torch.equal(p, weight) for p, weight in zip(model.parameters(), before, strict=True))
    again = wrapper(sgd(model, lr=0.01), model, every=every)
    stepped(model, again, inputs(3, size=2.0))
    assert {"0.weight", "2.weight"} <= again.coverage().treated.keys()


@each_by_inputs
def test_calls_of_a_part_of_a_network_do_not_count(wrapper):
    """Some hidden units alone, as of a slimmable network: a layer behind them reads fewer columns."""
    model = network()
    optimizer = wrapper(sgd(model, lr=0.01), model)
    first, _, last = model
    part = {"0.weight": first.weight[KEPT], "0.bias": first.bias[KEPT], "2.weight": last.weight[:, KEPT]}
    functional_call(model, part, (inputs(0),)).sum().backward()
    model(inputs(1)).sum().backward()
    optimizer.step()
    assert rows_counted(optimizer) == {"0.weight": 8, "2.weight": 8}
