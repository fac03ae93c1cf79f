"""Structural layers of complex numbers: |x|² is Σ |x_i|², not Σ x_i²."""

import torch
from torch import nn

from adiv_optim.layers import AffineLikeLinear, IsotropicTanh, L2Norm, NormLikeLinear, PatchNormConvTranspose1d

C = torch.complex128
ROWS = torch.randn(3, 4, dtype=C)


def length(x):
    return x.abs().square().sum(-1, keepdim=True).sqrt()


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
    patches = PatchNormConvTranspose1d(4, 2, 1, alpha=2.0, beta=0.5, dtype=C)
    patches.load_state_dict({"weight": plain.weight.T[:, :, None], "bias": plain.bias})
    torch.testing.assert_close(patches(ROWS[:, :, None])[..., 0], affine(ROWS))
