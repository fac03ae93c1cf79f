"""A step on one row moves that row's output by exactly -lr × g: measured by really stepping."""

import pytest
import torch
from torch import nn

from tests.helpers.cases import CONV, apply, conv, each_correction, linear
from tests.helpers.references import rows

LEARNING_RATE = 0.1
EXACT = 1e-12  # float64, absolute, on outputs of order one

ONE_ROW = {
    "linear": linear(5, 3, shape=(1, 5)),
    "linear-no-bias": linear(5, 3, bias=False, shape=(1, 5)),
    "linear-narrow-to-wide": linear(2, 17, shape=(1, 2)),
    "conv1d-one-patch-no-bias": conv(nn.Conv1d, 3, 4, 5, bias=False, shape=(1, 3, 5)),
    "conv2d-one-patch": conv(nn.Conv2d, 3, 4, 3, shape=(1, 3, 3, 3)),
    "conv2d-one-patch-dilated": conv(nn.Conv2d, 3, 4, 2, dilation=2, shape=(1, 3, 3, 3)),
    "conv2d-one-patch-padded": conv(nn.Conv2d, 3, 4, 4, padding=1, stride=2, shape=(1, 3, 2, 2)),
    "conv3d-one-patch": conv(nn.Conv3d, 2, 3, 2, shape=(1, 2, 2, 2, 2)),
}
each_one_row = pytest.mark.parametrize("case", ONE_ROW.values(), ids=ONE_ROW)

ONE_PATCH_PER_GROUP = {
    "groups": conv(nn.Conv2d, 4, 6, 3, groups=2, shape=(1, 4, 3, 3)),
    "depthwise": conv(nn.Conv2d, 3, 6, 2, groups=3, shape=(1, 3, 2, 2)),
}


def output_change(layer, x, g, correction):
    """Step once with SGD on the loss ⟨g, z⟩ and return z after minus z before."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    before = apply(layer, x, correction)
    before.backward(g)
    optimizer.step()
    return (layer(x) - before).detach()


def with_grad_output(case):
    layer, x = case.layer(), case.input()
    return layer, x, torch.randn_like(layer(x))


@each_one_row
@each_correction
def test_effective_update_of_one_row_is_ideal(case, correction):
    layer, x, g = with_grad_output(case)
    change = output_change(layer, x, g, correction)
    torch.testing.assert_close(change, -LEARNING_RATE * g, rtol=0, atol=EXACT)


@pytest.mark.parametrize("case", ONE_PATCH_PER_GROUP.values(), ids=ONE_PATCH_PER_GROUP)
@each_correction
def test_effective_update_of_one_patch_per_group_is_ideal(case, correction):
    layer, x, g = with_grad_output(case)
    change = output_change(layer, x, g, correction)
    torch.testing.assert_close(change, -LEARNING_RATE * g, rtol=0, atol=EXACT)


@each_one_row
def test_plain_sgd_misses_the_ideal_by_the_affine_divergence(case):
    layer, x, g = with_grad_output(case)
    ((row, _, _),) = rows(layer, x, g)
    divergence = row.square().sum() + (layer.bias is not None)
    change = output_change(layer, x, g, None)
    torch.testing.assert_close(change, -LEARNING_RATE * divergence * g, rtol=0, atol=EXACT * divergence.item())
    assert (change + LEARNING_RATE * g).abs().max() > 1e3 * EXACT


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", ["linear", "conv2d-one-patch"])
@each_correction
def test_effective_update_is_ideal_with_one_parameter_frozen(name, frozen, correction):
    layer, x, g = with_grad_output(ONE_ROW[name])
    getattr(layer, frozen).requires_grad_(False)
    change = output_change(layer, x, g, correction)
    torch.testing.assert_close(change, -LEARNING_RATE * g, rtol=0, atol=EXACT)


@each_correction
def test_diagonal_of_the_effective_update_is_ideal_for_every_row_of_a_batch(correction):
    # One row is given a gradient at a time, the others none, so that no interference is left.
    case = linear(6, 4, shape=(5, 6))
    for row in range(5):
        layer, x, g = with_grad_output(case)
        only = torch.zeros_like(g)
        only[row] = g[row]
        change = output_change(layer, x, only, correction)[row]
        torch.testing.assert_close(change, -LEARNING_RATE * g[row], rtol=0, atol=EXACT)


@each_correction
def test_diagonal_of_the_effective_update_is_ideal_at_every_position_of_an_image(correction):
    case = CONV["conv2d-padding"]
    spatial = case.layer()(case.input()).shape[2:]
    for position in [(0, 0), (1, 2), (spatial[0] - 1, spatial[1] - 1)]:
        layer, x, g = with_grad_output(case)
        only = torch.zeros_like(g)
        only[(0, slice(None), *position)] = g[(0, slice(None), *position)]
        change = output_change(layer, x, only, correction)
        torch.testing.assert_close(
            change[(0, slice(None), *position)], -LEARNING_RATE * g[(0, slice(None), *position)], rtol=0, atol=EXACT
        )
