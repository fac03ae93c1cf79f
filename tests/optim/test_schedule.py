"""Which steps measure: one in `every`, at places that no period of the training keeps to."""

import pytest
import torch
from torch import nn

from adiv_optim import Whitened


def due(opt, steps):
    """The steps before which rows count."""
    found = []
    for number in range(steps):
        opt.method.steps = number
        found += [number] * opt.method.due()
    return found


@pytest.mark.parametrize("every", [2, 3, 10])
def test_every_period_is_measured_at_all_of_its_places(every):
    layer = nn.Linear(2, 2)
    opt = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer, every=every)
    steps = due(opt, 20000)
    rounds = [number // every for number in steps if number >= every]
    assert rounds[:600] == list(range(1, len(rounds) + 1))[:600]
    for period in (2, 3, 4, 5, 7, 10):
        counts = torch.bincount(torch.tensor(steps) % period, minlength=period)
        assert counts.min() > 0.75 * counts.max()


def test_at_first_powers_of_two_are_measured_and_every_step_if_asked_for():
    layer = nn.Linear(2, 2)
    opt = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer, every=100)
    assert due(opt, 100) == [0, 1, 2, 4, 8, 16, 32, 64]
    opt = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer, every=1)
    assert due(opt, 50) == list(range(50))
