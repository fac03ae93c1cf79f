"""Which rows count, beside what the fuzzer compares: those counted by hand."""

import pytest
import torch
from torch import nn

from adiv_optim import Whitened
from tests.helpers.cases import relative_error
from tests.helpers.remembered import covariance_of, rows_counted

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize("counted", ["q", "k"])
def test_rows_by_hand_are_those_of_their_layer_alone(counted):
    model, x, d = nn.ModuleDict({"q": nn.Linear(4, 3), "k": nn.Linear(4, 3)}), torch.randn(6, 4), torch.randn(5, 4)
    opt = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1, decay=0, graft_norm=False)
    for by_hand in (False, True, True):
        opt.zero_grad()
        loss = (model["q"](x) + model["k"](x)).square().sum()
        if by_hand:
            opt.count_rows(model[counted], d)
        loss.backward()
        opt.step()
    ones, derivatives = torch.cat([x, torch.ones(6, 1)], 1), torch.cat([d, torch.zeros(5, 1)], 1)
    for name, layer in model.items():
        rows = torch.cat([ones, derivatives]) if name == counted else ones
        assert relative_error(covariance_of(opt, layer), rows.T @ rows / len(rows)) <= 1e-12


def test_only_steps_that_measure_count():
    layer, x, d = nn.Linear(2, 1), torch.randn(6, 2), torch.randn(5, 2)
    opt = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer, every=1000, decay=0)
    rows = []
    for step in range(9):
        opt.zero_grad()
        if step != 4:  # one of the steps that measure: 0, 1, 2, 4 and 8
            opt.count_rows(layer, d)
        layer(x).sum().backward()
        opt.step()
        rows.append(rows_counted(opt)["weight"])
    assert rows == [11, 11, 11, 11, 6, 6, 6, 6, 11]


def test_a_layer_that_is_not_measured_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    opt = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match=r"^Whitened\.count_rows: '1' is no layer that it measures"):
        opt.count_rows(model[1], torch.randn(2, 3))
    with pytest.raises(ValueError, match="'Linear' is no layer"):
        opt.count_rows(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(TypeError, match=r"^Whitened\.count_rows: rows is a list of 1; pass \(…, in_features\)"):
        opt.count_rows(model[0], [[1.0, 2.0, 3.0]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="its input has 2 features or channels; its weight takes 3"):
        opt.count_rows(model[0], torch.randn(2, 2))
    opt.detach()
    opt.count_rows(model[0], torch.randn(2, 3))  # as all else of a wrapper that is detached
