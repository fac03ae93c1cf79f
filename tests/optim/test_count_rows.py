"""Rows that are counted by hand: derivatives of inputs, with 0 in the place of the bias's 1."""

import pytest
import torch
from torch import nn

from adiv_optim import InputScaled, Preconditioned, Whitened
from adiv_optim._linalg import strips
from tests.helpers.inputs import mean_of, rms_of, spectra_of

EXACT = 1e-11

pytestmark = pytest.mark.usefixtures("in_float64")


def second_moment(x, d, one=0.0):
    """The mean of x~ x~ᵀ over inputs with a 1 and over derivatives with `one`, row by row."""
    rows = [torch.cat([row, torch.ones(1)]) for row in x] + [torch.cat([row, torch.full((1,), one)]) for row in d]
    return sum(torch.outer(row, row) for row in rows) / len(rows)


def solved(gradient, a, damping):
    """G (A + λI)⁻¹, λ in units of A's mean eigenvalue."""
    damped = a + damping * a.trace() / len(a) * torch.eye(len(a))
    return torch.linalg.solve(damped, gradient.T).T


def step_of(layer, x, d, **settings):
    """What Whitened SGD adds to weight and bias for a loss that is linear in both outputs and derivatives."""
    opt = Whitened(torch.optim.SGD(layer.parameters(), lr=1.0), layer, damping=0.3, graft_norm=False, **settings)
    before = torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1).detach().clone()
    opt.count_rows(layer, d)
    (layer(x).square().sum() + (d @ layer.weight.T).square().sum()).backward()
    gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
    opt.step()
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach() - before, gradient


def test_a_is_the_mean_over_inputs_and_derivatives():
    layer, x, d = nn.Linear(5, 3), torch.randn(7, 5), torch.randn(4, 2, 5)
    step, gradient = step_of(layer, x, d)
    assert torch.allclose(step, -solved(gradient, second_moment(x, d.flatten(0, 1)), 0.3), rtol=0, atol=EXACT)
    assert not torch.allclose(step, -solved(gradient, second_moment(x, d.flatten(0, 1), 1.0), 0.3), atol=1e-3)
    assert not torch.allclose(step, -solved(gradient, second_moment(x, d[:0].flatten(0, 1)), 0.3), atol=1e-3)


def test_blocks_of_columns_have_them_too():
    layer, x, d = nn.Linear(5, 3), torch.randn(7, 5), torch.randn(4, 5)
    step, gradient = step_of(layer, x, d, max_dim=3)
    a = second_moment(x, d)
    apart = a.clone()
    apart[:3, 3:], apart[3:, :3] = 0, 0
    assert torch.allclose(step, -solved(gradient, apart, 0.3), rtol=0, atol=EXACT)


def test_patches_of_derivatives_have_no_one(monkeypatch):
    monkeypatch.setattr(strips, "STRIP", 4)
    layer, x, d = nn.Conv1d(3, 2, 3, padding=1), torch.randn(4, 3, 5), torch.randn(2, 3, 5)
    opt = Whitened(torch.optim.SGD(layer.parameters(), lr=0.0), layer, every=1)
    opt.count_rows(layer, d)
    layer(x).sum().backward()
    opt.step()
    rows, derivatives = (
        nn.functional.unfold(each[:, :, None], (1, 3), padding=(0, 1)).mT.flatten(0, 1) for each in (x, d)
    )
    (found,) = mean_of(opt.method.layers[0])
    assert len(opt.method.layers[0].memory) == 2  # strips
    assert torch.allclose(found, second_moment(rows, derivatives), rtol=0, atol=EXACT)
    assert not torch.allclose(found, second_moment(rows, derivatives, 1.0), rtol=0, atol=1e-3)


def test_leading_eigenvectors_are_those_of_all_rows():
    torch.manual_seed(0)
    layer, x, d = nn.Linear(6, 3), torch.randn(40, 6), 3 * torch.randn(30, 6)
    opt = Whitened(torch.optim.SGD(layer.parameters(), lr=0.0), layer, rank=3, every=1, decay=0)
    for _ in range(200):
        opt.count_rows(layer, d)
        layer(x).sum().backward()
        opt.step()
    ((_, (values, _)),) = spectra_of(opt.method.layers[0])
    wanted = torch.linalg.eigvalsh(second_moment(x, d))[-3:]
    assert torch.allclose(values.sort().values, wanted, rtol=1e-8)
    assert not torch.allclose(values.sort().values, torch.linalg.eigvalsh(second_moment(x, d, 1.0))[-3:], rtol=1e-3)


def test_of_a_convolution_they_are_patches():
    layer, x, d = nn.Conv1d(2, 3, 2), torch.randn(4, 2, 5), torch.randn(6, 2, 5)
    opt = Preconditioned(torch.optim.SGD(layer.parameters(), lr=1.0), layer, damping=0.3)
    before = torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1).detach().clone()
    opt.count_rows(layer, d)
    layer(x).square().sum().backward()
    gradient = torch.cat([layer.weight.grad.flatten(1), layer.bias.grad[:, None]], 1)
    opt.step()
    step = torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1).detach() - before
    patches = [each.unfold(2, 2, 1).transpose(1, 2).flatten(0, 1).flatten(1) for each in (x, d)]
    wanted = solved(gradient, second_moment(*patches), 0.3)
    direction = [each.flatten() / each.norm() for each in (step, -wanted)]
    assert torch.allclose(*direction, rtol=0, atol=EXACT)


def test_input_scaled_measures_them():
    layer, x, d = nn.Linear(5, 3), torch.randn(7, 5), 4 * torch.randn(9, 5)
    opt = InputScaled(torch.optim.Adam(layer.parameters()), layer)
    opt.count_rows(layer, d)
    layer(x).sum().backward()
    opt.step()
    assert torch.allclose(rms_of(opt.method.layers[0]), torch.cat([x, d]).square().mean().sqrt(), rtol=EXACT)


def test_one_of_two_layers_that_share_a_covariance_leaves_it():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.q(x) + self.k(x)

    for counted in ("q", "k"):
        model, x, d = Two(), torch.randn(6, 4), torch.randn(5, 4)
        opt = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1, decay=0)
        for by_hand in (False, True, True):
            loss = model(x).square().sum()
            if by_hand:
                opt.count_rows(model.get_submodule(counted), d)
            loss.backward()
            opt.step()
            opt.zero_grad()
        for layer in opt.method.layers:
            wanted = second_moment(x, d if layer.name == f"{counted}.weight" else d[:0])
            assert torch.allclose(mean_of(layer)[0], wanted, rtol=0, atol=EXACT)


def test_only_steps_that_measure_count():
    layer, x, d = nn.Linear(2, 1), torch.randn(6, 2), torch.randn(5, 2)
    opt = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer, every=1000)
    for _ in range(4):
        opt.count_rows(layer, d)
        layer(x).sum().backward()
        opt.step()
    assert opt.method.steps == 4
    opt.count_rows(layer, d)  # the next one measures
    assert opt.method.layers[0].pending_rows == 5
    layer(x).sum().backward()
    opt.step()
    opt.count_rows(layer, d)
    assert opt.method.layers[0].pending_rows == 0


def test_a_layer_that_is_not_measured_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    opt = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match=r"^Whitened\.count_rows: '1' is no layer that it measures"):
        opt.count_rows(model[1], torch.randn(2, 3))
    with pytest.raises(ValueError, match="'Linear' is no layer"):
        opt.count_rows(nn.Linear(3, 3), torch.randn(2, 3))
    opt.detach()
    opt.count_rows(model[0], torch.randn(2, 3))  # as all else of a wrapper that is detached
