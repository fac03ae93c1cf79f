"""ScheduleFree, which keeps two sets of weights, inside a wrapper."""

import copy

import pytest
import torch
from torch import nn

from adiv_optim import GradientOnly, InputScaled, Preconditioned, Proportional, Whitened

schedulefree = pytest.importorskip("schedulefree")

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("in_float64")]


@pytest.mark.parametrize("wrapper", [GradientOnly, InputScaled, Preconditioned, Whitened])
def test_wrappers_refuse_schedule_free_and_say_which_order_works(wrapper):
    model = nn.Linear(4, 3)
    given = (Proportional(),) if wrapper is GradientOnly else ()
    with pytest.raises(TypeError, match=rf"second set of weights: write ScheduleFreeWrapper\({wrapper.__name__}\("):
        wrapper(schedulefree.SGDScheduleFree(model.parameters(), lr=0.1), model, *given)


def test_schedule_free_around_whitened_averages_what_whitened_steps_to():
    """z takes the step, x is the mean of all z, and the gradient is of y, between both."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    twin = copy.deepcopy(model)
    whitened, alone = (Whitened(torch.optim.SGD(m.parameters(), lr=0.1), m, every=1) for m in (model, twin))
    optimizer = schedulefree.ScheduleFreeWrapper(whitened, momentum=0.9)
    z = x = [p.detach().clone() for p in twin.parameters()]
    optimizer.train()
    for step in range(4):
        batch = torch.randn(6, 4)
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for p, a, b in zip(twin.parameters(), x, z, strict=True):
                p.copy_(0.9 * a + 0.1 * b)
        alone.zero_grad()
        twin(batch).square().sum().backward()
        with torch.no_grad():
            for p, b in zip(twin.parameters(), z, strict=True):
                p.copy_(b)
        alone.step()
        z = [p.detach().clone() for p in twin.parameters()]
        x = [a.lerp(b, 1 / (step + 1)) for a, b in zip(x, z, strict=True)]
    optimizer.eval()
    for p, a in zip(model.parameters(), x, strict=True):
        torch.testing.assert_close(p.detach(), a, rtol=1e-12, atol=1e-12)
