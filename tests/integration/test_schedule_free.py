"""ScheduleFree, which keeps two sets of weights, inside a wrapper."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import GradientOnly, Proportional, Whitened, attach

schedulefree = pytest.importorskip("schedulefree")

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("in_float64")]


def test_gradient_only_around_schedule_free_is_schedule_free_on_corrected_gradients():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    twin = attach(copy.deepcopy(model), Proportional())
    inner = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1)
    ours = GradientOnly(inner, model, Proportional())
    plain = schedulefree.AdamWScheduleFree(twin.parameters(), lr=0.1)
    for _ in range(2):
        for each, optimizer in ((model, ours), (twin, plain)):
            optimizer.train()
            torch.manual_seed(1)
            for _ in range(3):
                optimizer.zero_grad()
                F.cross_entropy(each(torch.randn(6, 4)), torch.randint(3, (6,))).backward()
                optimizer.step()
        trained = [p.detach().clone() for p in model.parameters()]
        ours.eval(), plain.eval()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), trained, strict=True))


def test_whitened_around_schedule_free_says_why_it_cannot_be_evaluated():
    model = nn.Linear(4, 3)
    optimizer = Whitened(schedulefree.SGDScheduleFree(model.parameters(), lr=0.1), model)
    with pytest.raises(AttributeError, match="SGDScheduleFree keeps its second set of weights"):
        optimizer.eval()
