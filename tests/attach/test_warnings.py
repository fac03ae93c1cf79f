"""Warnings point at the user's line, past frames of this package and of torch."""

import linecache
import warnings

import pytest
import torch
from torch import nn

from adiv_optim import GradientOnly, Proportional, Whitened


@pytest.mark.parametrize("wrap", [Whitened, lambda inner, model: GradientOnly(inner, model, Proportional())])
def test_of_a_step_at_the_call_of_step(wrap):
    model = nn.Linear(3, 2)
    opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)  # puts a function of its own around step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.weight.grad = torch.ones(2, 3)  # of a layer that is not called
            opt.step()
            scheduler.step()
    (told,) = (each for each in caught if str(each.message).startswith(("Whitened", "GradientOnly")))
    assert told.filename == __file__
    assert linecache.getline(__file__, told.lineno).strip() == "opt.step()"
