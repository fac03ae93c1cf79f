"""ChannelScale: the half of torch's normalisers that has parameters."""

import copy

import pytest
import torch
from torch import nn

from adiv_optim.layers import ChannelScale

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12

#: torch's normaliser, whose parameters are 1 and 0 at first; the scaling; an input.
NORMALISERS = {
    "layer-norm": (nn.LayerNorm(5), ChannelScale(5), (2, 3, 5)),
    "rms-norm": (nn.RMSNorm(5, eps=1e-6), ChannelScale(5, bias=False), (2, 5)),
    "batch-norm": (nn.BatchNorm2d(3), ChannelScale(3, dim=1), (2, 3, 4, 4)),
    "group-norm": (nn.GroupNorm(1, 4), ChannelScale(4, dim=-3), (2, 4, 3, 3)),
}


@pytest.mark.parametrize(("plain", "scale", "shape"), NORMALISERS.values(), ids=NORMALISERS)
def test_normaliser_without_parameters_then_scale_is_the_normaliser(plain, scale, shape):
    whole, x = copy.deepcopy(plain).double(), torch.randn(shape)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    parts = nn.Sequential(plain, scale).double()
    parts[1].load_state_dict(dict(whole.named_parameters()))
    torch.testing.assert_close(parts(x), whole(x), rtol=EXACT, atol=EXACT)


def test_starts_as_the_identity():
    x = torch.randn(2, 5)
    for layer in (ChannelScale(5), ChannelScale(5, elementwise_affine=False)):
        assert torch.equal(layer(x), x)
