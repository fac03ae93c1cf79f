"""A step on one row moves that row's output by exactly -lr × g: measured by really stepping."""

import pytest
import torch
from torch import nn

from tests.helpers.cases import apply, conv, each_correction, linear
from tests.helpers.references import rows

LEARNING_RATE = 0.1
EXACT = 1e-12  # float64, absolute, on outputs of order one

#: Layers of one row, or of one patch in each group.
ONE_ROW = {
    "linear": linear(5, 3, shape=(1, 5)),
    "linear-no-bias": linear(5, 3, bias=False, shape=(1, 5)),
    "conv1d-no-bias": conv(nn.Conv1d, 3, 4, 5, bias=False, shape=(1, 3, 5)),
    "conv2d": conv(nn.Conv2d, 3, 4, 3, shape=(1, 3, 3, 3)),
    "conv2d-dilated": conv(nn.Conv2d, 3, 4, 2, dilation=2, shape=(1, 3, 3, 3)),
    "conv2d-padded": conv(nn.Conv2d, 3, 4, 4, padding=1, stride=2, shape=(1, 3, 2, 2)),
    "conv2d-groups": conv(nn.Conv2d, 4, 6, 3, groups=2, shape=(1, 4, 3, 3)),
    "conv3d": conv(nn.Conv3d, 2, 3, 2, shape=(1, 2, 2, 2, 2)),
}


def output_change(layer, x, g, correction):
    """Step once with SGD on the loss ⟨g, z⟩ and return z after minus z before."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    before = apply(layer, x, correction)
    before.backward(g)
    optimizer.step()
    optimizer.zero_grad()
    return (layer(x) - before).detach()


@pytest.mark.parametrize("case", ONE_ROW.values(), ids=ONE_ROW)
@each_correction
def test_effective_update_of_one_row_is_ideal_and_plain_sgd_misses_it_by_the_affine_divergence(case, correction):
    layer, x = case.layer(), case.input()
    g = torch.randn_like(layer(x))
    for frozen in (None, "weight", "bias"):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name != frozen)
        change = output_change(layer, x, g, correction)
        torch.testing.assert_close(change, -LEARNING_RATE * g, rtol=0, atol=EXACT)
        if layer.bias is None:
            break
    layer.requires_grad_(True)
    row, *others = (row for row, _, _ in rows(layer, x, g))
    if not others:
        divergence = row.square().sum() + (layer.bias is not None)
        change = output_change(layer, x, g, None)
        torch.testing.assert_close(change, -LEARNING_RATE * divergence * g, rtol=0, atol=EXACT * divergence.item())
        assert (change + LEARNING_RATE * g).abs().max() > 1e3 * EXACT
