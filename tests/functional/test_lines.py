"""Products over patches, made of products of lines, are those of the patches themselves."""

import pytest
import torch
from torch import nn

from adiv_optim.functional import lines, patches
from adiv_optim.functional.lines import sums_over_patches
from adiv_optim.functional.patches import Geometry, Patches
from tests.fuzz.by_hand import rows
from tests.helpers.cases import relative_error

EXACT = 1e-12  # float64

pytestmark = pytest.mark.usefixtures("in_float64")

#: Image, kernel, stride, padding, dilation, groups. Of the few lines none is read by all places of the kernel.
CASES = {
    "same": ((6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "valid": ((6, 5), (3, 2), (1, 1), (0, 0), (1, 1), 1),
    "groups": ((5, 6), (3, 3), (1, 1), (1, 0), (1, 1), 2),
    "wide-padding": ((4, 4), (2, 3), (1, 1), (3, 2), (1, 1), 1),
    "dilation": ((9, 7), (3, 2), (1, 1), (2, 1), (2, 3), 2),
    "stride": ((7, 6), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "stride-across": ((7, 6), (3, 3), (1, 2), (1, 1), (1, 1), 1),
    "stride-and-dilation": ((9, 6), (3, 2), (2, 1), (1, 1), (2, 1), 2),
    "few-lines": ((7, 4), (5, 3), (1, 1), (0, 1), (1, 1), 1),
    "one-line": ((5, 4), (1, 3), (1, 1), (0, 1), (1, 1), 1),
    "1d": ((8,), (4,), (1,), (2,), (1,), 2),
    "3d": ((5, 4, 3), (3, 2, 2), (1, 1, 2), (1, 0, 1), (1, 2, 1), 1),
}


@pytest.mark.parametrize(("image", "kernel", "stride", "padding", "dilation", "groups"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("numbers", [2**19, 8], ids=["whole", "slices"])
@pytest.mark.parametrize("by_lines", [True, False], ids=["lines", "unfolded"])
def test_sums_are_those_of_the_patches(
    monkeypatch, by_lines, numbers, image, kernel, stride, padding, dilation, groups
):
    monkeypatch.setattr(patches, "PATCH_NUMBERS", numbers)
    monkeypatch.setattr(lines, "is_cheaper_by_lines", lambda read: by_lines)
    x = torch.randn(3, 2 * groups, *image)
    read = Patches(x, kernel, Geometry(stride, padding, dilation, groups))
    gram, total = sums_over_patches(read, x.dtype)
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(image)]
    patch_rows = rows(layer(x.shape[1], groups, kernel, stride, padding, dilation, groups), x)
    wanted = torch.stack(patch_rows)  # (groups, rows, features): every patch
    assert relative_error(gram, wanted.mT @ wanted) <= EXACT
    assert relative_error(total[..., 0], wanted.sum(1)) <= EXACT
    assert len(x) * read.positions == wanted.shape[1]


def test_the_way_that_multiplies_and_calls_less_is_taken():
    def pays(image: tuple[int, ...], kernel: tuple[int, ...], step: int, groups: int = 1) -> bool:
        places = [(number,) * len(kernel) for number in (step, 0, 1)]
        return lines.is_cheaper_by_lines(Patches(torch.empty(image, device="meta"), kernel, Geometry(*places, groups)))

    assert pays((8, 64, 16, 16), (3, 3), 1)  # three products of 64 × 3 columns, not one of 64 × 9
    assert not pays((16, 1, 16000), (400,), 160)  # 80,200 products of a column each
    assert not pays((1, 1024, 26), (15,), 1, groups=16)  # the matrix of the patches is large
    assert not pays((1, 1024, 6, 3), (3, 3), 2, groups=16)  # lines are so narrow that reading them costs most
