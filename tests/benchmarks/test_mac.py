"""MAC's gradients are those of the inverse that it stands for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.methods import DECAY, MAC


def rows_of(layer, x):
    rows = F.unfold(x, 3, padding=1).mT.flatten(0, 1) if isinstance(layer, nn.Conv2d) else x
    return torch.cat([rows, torch.ones(len(rows), 1, dtype=x.dtype)], 1) if layer.bias is not None else rows


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_gradients_are_multiplied_by_the_damped_inverse(kind, bias):
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias) if kind == "linear" else nn.Conv2d(2, 3, 3, padding=1, bias=bias)
    layer.double()
    inputs = [torch.randn(5, *((4,) if kind == "linear" else (2, 6, 6))).double() + 1 for _ in range(2)]
    opt = MAC(torch.optim.SGD(layer.parameters(), lr=1.0), layer, damping=0.5)
    for x in inputs:
        opt.zero_grad()
        layer(x).square().sum().backward()
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    gradients = torch.cat([parameter.grad.reshape(3, -1) for parameter in layer.parameters()], 1)
    opt.step()
    moved = torch.cat([(old - new).reshape(3, -1) for old, new in zip(before, layer.parameters(), strict=True)], 1)

    first, second = (rows_of(layer, x).mean(0) for x in inputs)
    mean = DECAY * first + (1 - DECAY) * second
    rho = 0.5 * mean.square().mean()
    covariance = mean.outer(mean) + rho * torch.eye(len(mean)).double()
    torch.testing.assert_close(moved, rho * gradients @ covariance.inverse(), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(moved, gradients)


def test_fused_optimizers_read_the_same_gradients():
    """They take a gradient to lie in memory as its parameter does."""

    def moved(fused):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        opt = MAC(torch.optim.Adam(layer.parameters(), lr=0.1, fused=fused), layer, damping=0.5)
        for _ in range(3):
            opt.zero_grad()
            layer(torch.randn(5, 4)).square().sum().backward()
            opt.step()
        return layer.weight

    torch.testing.assert_close(moved(True), moved(False))
