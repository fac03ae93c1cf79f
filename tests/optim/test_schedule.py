"""Which steps measure: one in `every`, at places that no period of the training keeps to."""

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Whitened


class Noting(nn.Linear):
    """Notes the steps before which its rows are asked for: those that measure."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.step, self.steps_that_measure = 0, list[int]()

    def input_rows(self, input: Tensor) -> Tensor:
        self.steps_that_measure.append(self.step)
        return input


def measured(every: int, steps: int) -> list[int]:
    layer, x = Noting(), torch.randn(3, 2)
    optimizer = Whitened(torch.optim.SGD(layer.parameters(), lr=1e-3), layer, every=every)
    for layer.step in range(steps):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()
    return layer.steps_that_measure


@pytest.mark.parametrize("every", [2, 3, 10])
def test_every_period_is_measured_at_all_of_its_places(every):
    steps = measured(every, 300 * every)
    rounds = [number // every for number in steps if number >= every]
    assert rounds == list(range(1, 300))
    for period in (2, 3, 4, 5, 7, 10):
        counts = torch.bincount(torch.tensor(steps) % period, minlength=period)
        assert counts.min() > 0.5 * len(steps) / period  # of an even share


def test_at_first_powers_of_two_are_measured_and_every_step_if_asked_for():
    assert measured(100, 100) == [0, 1, 2, 4, 8, 16, 32, 64]
    assert measured(1, 50) == list(range(50))
