"""Structural layers of complex numbers: |x|² is Σ |x_i|², not Σ x_i²."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from adiv_optim.layers import (
    AffineLikeLinear,
    IsotropicTanh,
    L2Norm,
    NormLikeLinear,
    PatchNormConv2d,
    PatchNormConvTranspose1d,
)

C = torch.complex128
ROWS = torch.randn(3, 4, dtype=C)
IMAGE = torch.randn(2, 4, 5, 5, dtype=C)


def length(x, dim=-1):
    return x.abs().square().sum(dim, keepdim=True).sqrt()


def test_rows_are_divided_by_their_length():
    torch.testing.assert_close(L2Norm()(ROWS), ROWS / length(ROWS))
    torch.testing.assert_close(IsotropicTanh()(ROWS), ROWS * torch.tanh(length(ROWS)) / length(ROWS))


def test_linear_layers_are_their_formulas():
    plain = nn.Linear(4, 2, dtype=C)
    affine, norm = AffineLikeLinear(4, 2, alpha=2.0, beta=0.5, dtype=C), NormLikeLinear(4, 2, dtype=C)
    for layer in (affine, norm):
        layer.load_state_dict(plain.state_dict())
    linear, bias = ROWS @ plain.weight.T, plain.bias
    torch.testing.assert_close(affine(ROWS), (2 * linear + bias / 2) / (4 * length(ROWS) ** 2 + 1 / 4).sqrt())
    torch.testing.assert_close(norm(ROWS), linear / length(ROWS) + bias)


LAYERS = {
    "l2": (L2Norm(), ROWS),
    "isotropic-tanh": (IsotropicTanh(), ROWS),
    "affine-like": (AffineLikeLinear(4, 2, dtype=C), ROWS),
    "patch-norm": (PatchNormConv2d(4, 2, 3, dtype=C), IMAGE),
    "transposed": (PatchNormConvTranspose1d(4, 2, 2, dtype=C), ROWS[:, :, None]),
}


@pytest.mark.parametrize(("layer", "x"), LAYERS.values(), ids=LAYERS)
def test_derivatives_pass_gradcheck(layer, x):
    assert gradcheck(layer, x.clone().requires_grad_(), check_forward_ad=True, fast_mode=True)
