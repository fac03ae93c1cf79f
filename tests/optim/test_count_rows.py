"""Rows that are counted by hand, beside what the fuzzer compares: when, and of which layers."""

import pytest
import torch
from torch import nn

from adiv_optim import Whitened
from tests.helpers.remembered import rows_counted

pytestmark = pytest.mark.usefixtures("in_float64")


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
