"""gauge.rz_scaling: what defines it, at float64 precision, against slow forms."""

import pytest
import torch
from torch import Tensor, nn

from adiv_optim.gauge import rz_scaling
from tests.helpers.matrices import (
    INVARIANCE,
    MATRICES,
    MEANS,
    RECONSTRUCTION,
    SOME,
    deviation_of_means,
    largest_ratio,
    scaled,
    sparse,
    units,
    zero_lines,
)

pytestmark = pytest.mark.usefixtures("in_float64")

each_matrix = pytest.mark.parametrize("build", MATRICES.values(), ids=MATRICES)


@each_matrix
def test_product_is_the_weight_and_geometric_means_are_one_which_no_scaling_changes(build):
    """The positive scales by which they are have one canonical form alone."""
    weight = build()
    scaling = rz_scaling(weight)
    assert deviation_of_means(scaling.canonical) <= MEANS
    assert scaling.canonical.shape == weight.shape
    assert scaling.canonical.dtype == weight.dtype
    assert (scaling.row_scale > 0).all()
    assert (scaling.column_scale > 0).all()
    assert largest_ratio(scaled(scaling.canonical, scaling.row_scale, scaling.column_scale), weight) <= RECONSTRUCTION
    wrong = scaled(scaling.canonical, scaling.row_scale, scaling.column_scale * (1 + 1e-13))
    assert not weight.any() or largest_ratio(wrong, weight) > RECONSTRUCTION
    moved = rz_scaling(scaled(weight, *units(weight))).canonical
    assert largest_ratio(moved, scaling.canonical) <= INVARIANCE


@pytest.mark.parametrize("name", [*SOME, "all-zero"])
def test_rows_and_columns_carry_half_of_every_component(name):
    """Of all c in (cD, E/c), the one by which both have the same product over the component's entries."""
    weight = MATRICES[name]()
    scaling = rz_scaling(weight)
    support = (weight != 0).double()
    rows, columns = scaling.row_scale.log(), scaling.column_scale.log()
    # The component of every row by brute force: rows reached from it through columns.
    reach = (support @ support.mT).sign()
    for _ in range(6):
        reach = (reach @ reach).sign()
    from_rows = (reach @ (support.sum(-1) * rows)[..., None])[..., 0]
    owners = (reach @ support).sign()  # component × column
    from_columns = (owners @ (support.sum(-2) * columns)[..., None])[..., 0]
    assert (from_rows - from_columns).abs().max() <= MEANS * max(1, from_rows.abs().max().item())
    if weight.any():
        moved = (reach @ (support.sum(-1) * (rows + 1e-3))[..., None])[..., 0]
        assert (moved - from_columns).abs().max() > MEANS


def test_large_weights_with_zeros_carry_half_in_rows_and_columns():
    """Rounding has a part along (cD, E/c), which the equations do not see."""
    torch.manual_seed(17)
    weight = (2 * torch.rand(512, 512) - 1) * (torch.rand(512, 512) < 0.9)
    scaling, support = rz_scaling(weight), (weight != 0).double()
    rows, columns = support.sum(1) @ scaling.row_scale.log(), support.sum(0) @ scaling.column_scale.log()
    assert (rows - columns).abs() <= MEANS * rows.abs()


def test_rows_and_columns_of_zeros_keep_scale_one():
    weight = zero_lines()
    scaling = rz_scaling(weight)
    assert scaling.row_scale[2] == 1
    assert (scaling.column_scale[[0, 4]] == 1).all()
    kept = rz_scaling(weight[[0, 1, 3, 4]][:, [1, 2, 3, 5]])  # as if they were not there
    assert largest_ratio(scaling.row_scale[[0, 1, 3, 4]], kept.row_scale) <= INVARIANCE
    assert (kept.row_scale != 1).all()
    zeros = rz_scaling(torch.zeros(2, 3))
    assert torch.equal(zeros.row_scale, torch.ones(2))
    assert torch.equal(zeros.column_scale, torch.ones(3))


KERNELS = {"groups": 2, "kernel_dims": 2}


@pytest.mark.parametrize("kernels", [{}, KERNELS], ids=["matrices", "kernels"])
def test_members_of_a_batch_are_told_apart(kernels):
    weight = sparse(3, 4, 2, 3, 3, density=0.8) if kernels else MATRICES["batch-some-sparse"]()
    weight[0] = torch.randn_like(weight[0])
    scaling = rz_scaling(weight, **kernels)
    for index in range(len(weight)):
        for part, wanted in zip(scaling, rz_scaling(weight[index], **kernels), strict=True):
            assert largest_ratio(part[index], wanted) <= RECONSTRUCTION
    assert largest_ratio(scaling.row_scale[:1], scaling.row_scale[1:2]) > 1e-3
    alone = rz_scaling(weight[:1], **kernels)
    assert torch.equal(scaling.canonical[0], alone.canonical[0])  # bit for bit without its neighbours


CONVOLUTIONS = {
    "conv2d": lambda: nn.Conv2d(3, 4, (2, 3)),
    "conv2d-depthwise": lambda: nn.Conv2d(3, 6, 3, groups=3),
    "conv2d-channels-last": lambda: nn.Conv2d(6, 4, 3, groups=2).to(memory_format=torch.channels_last),
    "conv3d": lambda: nn.Conv3d(4, 4, 2, groups=2),
}


@pytest.mark.parametrize("build", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("holes", [False, True], ids=["dense", "holes"])
def test_kernels_scale_by_channel_and_group(build, holes):
    layer = build()
    weight, groups, kernel_dims = layer.weight.detach(), layer.groups, layer.weight.dim() - 2
    if holes:
        weight[torch.rand_like(weight) < 0.4] = 0
        weight[0, 0] = 0

    def multiplied(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Eq. 21, one channel pair at a time."""
        result = weight.clone()
        out, inputs = weight.shape[:2]
        for o in range(out):
            for i in range(inputs):
                result[o, i] *= rows[o] * columns[o // (out // groups) * inputs + i]
        return result

    scaling = rz_scaling(weight, groups=groups, kernel_dims=kernel_dims)
    assert scaling.row_scale.shape == (layer.out_channels,)
    assert scaling.column_scale.shape == (layer.in_channels,)
    product = multiplied(scaling.canonical, scaling.row_scale, scaling.column_scale)
    assert largest_ratio(product, weight) <= RECONSTRUCTION
    blocks = scaling.canonical.unflatten(0, (groups, -1))
    assert deviation_of_means(blocks, kernel_dims) <= MEANS
    rows, columns = torch.randn(layer.out_channels).exp(), torch.randn(layer.in_channels).exp()
    moved = rz_scaling(multiplied(weight, rows, columns), groups=groups, kernel_dims=kernel_dims)
    assert largest_ratio(moved.canonical, scaling.canonical) <= INVARIANCE
    if groups > 1 and weight.shape[1] > 1:  # one matrix for all groups would be another answer
        assert largest_ratio(rz_scaling(weight, kernel_dims=kernel_dims).canonical, scaling.canonical) > 1e-3
