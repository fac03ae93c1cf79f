"""Optimizers that keep copies of weights in their state, which are in the coordinates of then: a warning names them."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from adiv_optim import InputScaled, UnitConsistent, Whitened
from adiv_optim.optim.unread import copies_in_state
from tests.helpers.unit_consistent import BATCHES, mlp, train

pytestmark = pytest.mark.usefixtures("in_float64")


class KeepingWeights(torch.optim.SGD):
    """Keeps a copy of the weights as it finds them, and writes it back, as Lookahead does at its every sixth step."""

    def __init__(self, parameters, after=0, **settings):
        super().__init__(parameters, **settings)
        self.left = after

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.left -= 1
        for p in self.param_groups[0]["params"]:
            if self.left < 0:
                p.copy_(self.state[p].setdefault("slow", p.clone()))


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize(
    "wrap", [Whitened, InputScaled, lambda o, m: UnitConsistent(o, m, example_input=BATCHES[0][0])]
)
def test_an_optimizer_that_keeps_weights_in_its_state_is_named_once(wrap, after):
    model = mlp()
    optimizer = wrap(KeepingWeights(model.parameters(), after, lr=0.01), model)
    with pytest.warns(UserWarning, match=r"KeepingWeights keeps a copy of weights in its state, 'slow'") as caught:
        train(model, optimizer, [(8 * x, y) for x, y in BATCHES] * 2)
    assert len([warning for warning in caught if "keeps a copy" in str(warning.message)]) == 1


def test_step_is_whole_where_that_warning_is_an_error():
    model = mlp()
    whole, warned = (Whitened(KeepingWeights(m.parameters(), lr=0.01), m) for m in (model, copy.deepcopy(model)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(whole.model, whole, BATCHES[:1])
    with pytest.raises(UserWarning, match="keeps a copy"):
        train(warned.model, warned, BATCHES[:1])
    for optimizer in (whole, warned):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(optimizer.model, optimizer, BATCHES[1:2])
    ours, theirs = (dict(optimizer.model.named_parameters()) for optimizer in (warned, whole))
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam, torch.optim.Rprop])
def test_averages_of_gradients_are_not_taken_for_weights(kind):
    model = mlp()
    inner = type(f"Own{kind.__name__}", (kind,), {})(model.parameters(), lr=1e-3)  # of an unknown type
    train(model, Whitened(inner, model), BATCHES * 3)  # warnings are errors


def test_averages_of_weights_are():
    model = mlp()
    optimizer = Whitened(torch.optim.ASGD(model.parameters(), lr=1e-3), model)
    with pytest.warns(UserWarning, match="ASGD keeps a copy of weights in its state, 'ax'"):
        train(model, optimizer, BATCHES)


def test_state_that_is_zero_as_a_weight_is_says_nothing():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = KeepingWeights([weight], lr=0.1)

    def found(state, *weights):
        optimizer.state[weight] = state
        return {key: bool(flag) for key, flag in copies_in_state(optimizer, weight, *weights).items()}

    assert found({"exp_avg": torch.zeros(3)}, weight) == {"exp_avg": False}
    assert found({"step": torch.tensor(1.0), "p0": torch.ones(3)}, weight, torch.ones(3)) == {"p0": True}
    with torch.device("meta"):
        assert found({"elsewhere": torch.ones(3)}, torch.ones(3, device="cpu")) == {}
    assert found({"in-two": TwoTensor(torch.ones(3), torch.ones(3))}, torch.ones(3)) == {}
    assert found({"cut": torch.ones(2), "whole": torch.ones(3)}, torch.ones(2)) == {"cut": True}  # of a sharded weight
    assert found([torch.ones(3)], torch.ones(3)) == {}  # no names
    assert copies_in_state(torch.optim.SGD([weight]), weight, weight) == {}
