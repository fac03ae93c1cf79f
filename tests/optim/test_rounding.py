"""Rounding is no gradient: what has none stays where it is, and large or uneven inputs keep their digits."""

import pytest
import torch
from torch import nn

from adiv_optim import Whitened
from tests.helpers.remembered import covariance_of
from tests.helpers.steps import BY_COVARIANCE, stepped


@pytest.mark.parametrize("alive", [21, 3])  # the eigenvectors that a rank tells apart are fewer, or more
@pytest.mark.parametrize("name", BY_COVARIANCE)
def test_weights_of_inputs_that_are_always_zero_stay_where_they_are(name, alive):
    layer, x = nn.Linear(32, 8), torch.randn(64, 32)
    dead = torch.arange(32) % 3 == 0
    dead[torch.nonzero(~dead)[alive:]] = True
    x[:, dead] = 0
    before = layer.weight.detach().clone()
    options = {"rank": 8} if name == "rank" else {}
    stepped(layer, BY_COVARIANCE[name](torch.optim.Adam(layer.parameters(), lr=1e-3), layer, **options), *[x] * 40)
    assert torch.equal(layer.weight[:, dead], before[:, dead])
    assert (layer.weight - before)[:, ~dead].abs().min() > 0


def step_of_uneven_features(dtype):
    """The step of a layer behind features of scales from 1e-4 to 1e4."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-4, 4, 20, dtype=torch.float64)
    x, y = (torch.randn(256, size, generator=generator, dtype=torch.float64) for size in (20, 3))
    layer = nn.Linear(20, 3, bias=False).to(dtype)
    nn.init.zeros_(layer.weight)  # steps of large weights would be rounded with them
    opt = Whitened(torch.optim.Adam(layer.parameters(), lr=1e-3), layer)
    (layer((x * scales).to(dtype)) - y.to(dtype)).square().mean().backward()
    opt.step()
    return layer.weight.detach().double()


def test_features_of_uneven_scales_keep_their_steps():
    exact, found = step_of_uneven_features(torch.float64), step_of_uneven_features(torch.float32)
    assert (found - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("settings", [{}, {"rank": 4}], ids=str)
def test_large_inputs_do_not_overflow_the_roots(settings):
    layer, x = nn.Linear(16, 8), torch.randn(128, 16)
    x[:, 3] = 1e12 + 1e10 * x[:, 3]
    opt = Whitened(torch.optim.Adam(layer.parameters(), lr=1e-3, weight_decay=1e-2), layer, **settings)
    for _ in range(12):
        opt.zero_grad()
        (layer(x).tanh() - x[:, 5:13]).square().mean().backward()
        opt.step()
    assert layer.weight.isfinite().all()
    assert opt.metrics()["Whitened/failed_factorisations"] == 0


def test_eigenvectors_find_inputs_that_were_always_zero_until_now():
    layer = nn.Linear(24, 1, bias=False).double()
    opt = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer, rank=6, every=1, decay=0.5, graft_norm=False)
    known, squares, rows = [], 0.0, 0.0
    for step in range(60):
        x = torch.randn(40, 24).double()
        x[:, 12 if step < 8 else 24 :] = 0
        layer(x).sum().backward()
        opt.step()
        squares, rows = 0.5 * squares + x.square().sum(), 0.5 * rows + 40
        if step in (7, 59):
            covariance = covariance_of(opt, layer)
            apart = covariance - covariance.diagonal().diag()
            known.append(apart[12:].norm(dim=1) > 1e-3 * covariance.diagonal().mean())
    assert not known[0].any()
    assert known[1].all()
    assert covariance.trace() == pytest.approx(squares / rows)  # as of orthonormal eigenvectors
