"""Which steps measure: one in `every`, at places that no period of the training keeps to."""

import warnings

import pytest
import torch
from torch import nn

from adiv_optim import InputScaled, Preconditioned, Whitened


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


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])

    def forward(self, x, head):
        return self.heads[head](x)


def unseen(model, opt, steps=60, gradients=torch.ones_like):
    """Train two heads, the second by gradients of passes that no hook sees, but for the first step."""
    for step in range(steps):
        opt.zero_grad()
        model(torch.eye(3) * (1 + step), 0).sum().backward()
        if step == 0:
            model(torch.eye(3), 1).sum().backward()
        for parameter in model.heads[1].parameters():
            parameter.grad = gradients(parameter)
        opt.step()


@pytest.mark.parametrize("wrap", [Preconditioned, Whitened, InputScaled])
def test_a_layer_with_gradients_and_no_rows_for_long_is_named_once(wrap):
    model = Heads()
    opt = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, every=2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        unseen(model, opt)
    (told,) = [str(each.message) for each in warned]
    assert told.startswith("heads.1.weight: gradients, but no rows in the last 10 measurements.")
    assert "One step in 2 measures" in told
    assert "no rows in the last 10 measurements" in opt.coverage().treated["heads.1.weight"]
    assert "no rows" not in opt.coverage().treated["heads.0.weight"]


def test_gradients_of_zero_are_no_matter():
    """As zero_grad(set_to_none=False) leaves them to a layer that the batch did not reach."""
    model = Heads()
    opt = Whitened(torch.optim.SGD(model.parameters(), lr=0.0), model, every=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unseen(model, opt, gradients=torch.zeros_like)


def test_a_step_that_names_such_a_layer_is_whole_where_warnings_are_errors():
    found = []
    for action in ("ignore", "error"):
        torch.manual_seed(0)
        model, told = Heads(), 0
        opt = Whitened(torch.optim.SGD(model.parameters(), lr=0.01), model, every=2)
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            try:
                unseen(model, opt)
            except UserWarning:
                told += 1
        found.append([told, opt.method.steps, *(p.detach() for p in model.parameters())])
    steps = found[1][1]
    torch.manual_seed(0)
    model = Heads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unseen(model, Whitened(torch.optim.SGD(model.parameters(), lr=0.01), model, every=2), steps)
    assert found[1][0] == 1
    assert steps < found[0][1]
    assert all(torch.equal(*pair) for pair in zip(found[1][2:], model.parameters(), strict=True))
