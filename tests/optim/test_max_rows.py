"""Covariances of some of the rows that layers read."""

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Whitened
from adiv_optim.attach.rows import patches_of
from tests.helpers.cases import relative_error
from tests.helpers.inputs import mean_of
from tests.helpers.whitened import batches, small, train

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12


def chosen(total: int, count: int, turn: int = 0) -> list[int]:
    """One sample of each of so many nearly equal spans, where the multiples of the golden ratio point."""
    found = []
    for number in range(count):
        start, end = total * number // count, total * (number + 1) // count
        found.append(start + (number + turn) * 2654435769 % 2**32 * (end - start) // 2**32)
    return found


def covariance(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The mean of x~ x~ᵀ over all rows, for each group."""
    rows = torch.cat([part for _, part in patches_of(layer, x).parts(torch.float64)], 1)
    if layer.bias is not None:
        rows = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], -1)
    return [sum(torch.outer(row, row) for row in group) / len(group) for group in rows]


def test_as_many_rows_as_there_are_leave_the_step_as_it_is():
    def path(**options: int) -> list[Tensor]:
        model, optimizer = small(**options)
        return train(model, optimizer, batches(3))

    assert all(torch.equal(one, other) for one, other in zip(path(), path(max_rows=40), strict=True))
    assert not torch.equal(path()[0], path(max_rows=8)[0])


def test_every_step_that_measures_takes_other_rows_and_goes_on_after_a_checkpoint():
    layer, x = nn.Linear(5, 3), torch.randn(40, 5)

    def optimizer() -> Whitened:
        return Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer, max_rows=4, every=1, decay=0.0)

    before, found = optimizer(), []
    for _ in range(3):
        before.zero_grad()
        layer(x).sum().backward()
        before.step()
        found.append(mean_of(before.method.layers[0])[0])
        after = optimizer()
        after.load_state_dict(before.state_dict())
        before.detach()
        before = after
    wanted = [covariance(layer, x[chosen(40, 4, turn)])[0] for turn in range(3)]
    assert all(relative_error(one, other) <= EXACT for one, other in zip(found, wanted, strict=True))
    assert relative_error(found[0], found[1]) > 1e-3


def test_rows_of_a_convolution_are_at_least_those_of_one_sample():
    layer = nn.Conv2d(2, 3, 3)
    optimizer = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer, max_rows=1)
    layer(torch.randn(4, 2, 5, 5)).sum().backward()
    assert optimizer.method.layers[0].pending_rows == 9


def test_all_positions_of_sequences_are_among_the_rows():
    length, count = 64, 1024
    tokens = torch.arange(8 * count)[:, None].double()
    rows = patches_of(nn.Linear(1, 1), tokens).spread(count, 0).input.flatten().long()
    assert len(rows.unique()) == count
    assert torch.equal(rows, torch.tensor(chosen(8 * count, count)))
    assert rows.remainder(length).bincount(minlength=length).min() >= count // length // 2
    assert torch.arange(0, 8 * count, 8).remainder(length).bincount(minlength=length).min() == 0  # at even steps


def test_rows_of_another_precision_are_copied_a_quarter_at_a_time(monkeypatch):
    monkeypatch.setattr("adiv_optim.functional.patches.PATCH_NUMBERS", 8)
    layer, x = nn.Linear(5, 3), torch.randn(16, 5)
    (whole,), quarters = (
        [rows for _, rows in patches_of(layer, x).parts(dtype)] for dtype in (torch.float64, torch.float32)
    )
    assert whole.data_ptr() == x.data_ptr()
    assert [rows.shape for rows in quarters] == [(1, 4, 5)] * 4
    assert torch.equal(torch.cat(quarters, 1), whole.float())
