"""divergence of convolutions without a closed form: the rows they have, and the samples those read."""

import pytest
import torch
from torch import nn

from adiv_optim.diagnostics import divergence
from adiv_optim.layers import PatchNormConv2d

EXACT = 1e-12  # float64

pytestmark = pytest.mark.usefixtures("in_float64")

LAYERS = {"patch-norm": PatchNormConv2d, "transposed": nn.ConvTranspose2d}
each_layer = pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)


def weighted(output, weights):
    return (output * weights).sum()


def measured(layer, x):
    return divergence(layer, weighted, x, torch.randn_like(layer(x))).layers[""]


@each_layer
@pytest.mark.parametrize("padding", [0, (1, 0), 1], ids=["other-size", "all-but-the-last", "same-size"])
def test_squared_norm_is_the_samples_whatever_dimensions_input_and_output_share(build, padding):
    layer, x = build(4, 4, 3, padding=padding), torch.randn(2, 4, 5, 6)
    found = measured(layer, x)
    per_sample = layer(x)[0, 0].numel()
    assert found.total_rows == 2 * per_sample
    wanted = x.square().sum((1, 2, 3)).repeat_interleave(per_sample)
    torch.testing.assert_close(found.squared_norm, wanted, rtol=EXACT, atol=EXACT)


@each_layer
def test_a_sample_without_a_batch_dimension_is_a_batch_of_one(build):
    layer, x = build(4, 3, 3, padding=1), torch.randn(4, 5, 6)
    g = torch.randn_like(layer(x))
    one = divergence(layer, weighted, x, g).layers[""]
    batch = divergence(layer, weighted, x.unsqueeze(0), g.unsqueeze(0)).layers[""]
    for name in ("cosine", "projection", "gain", "interference", "squared_norm"):
        torch.testing.assert_close(getattr(one, name), getattr(batch, name), rtol=EXACT, atol=EXACT)
