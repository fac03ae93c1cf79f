"""gauge.uc_adjoint and uc_inverse: that units do not matter to them."""

import pytest
import torch
from torch import Tensor

from adiv_optim.gauge import rz_scaling, uc_adjoint, uc_inverse
from tests.helpers.matrices import MATRICES, RECONSTRUCTION, SOME, largest_ratio, scaled, units

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize("build", [MATRICES[name] for name in SOME], ids=SOME)
def test_adjoint_is_the_transpose_between_inverse_scales(build):
    weight = build()
    scaling = rz_scaling(weight)
    wanted = weight.mH / scaling.column_scale[..., :, None] / scaling.row_scale[..., None, :]
    assert largest_ratio(uc_adjoint(weight), wanted) <= RECONSTRUCTION


def low_rank(rows: int, columns: int, rank: int) -> Tensor:
    return torch.randn(rows, rank) @ torch.randn(rank, columns)


def low_rank_with_zeros() -> Tensor:
    weight = torch.block_diag(low_rank(3, 4, 1), low_rank(4, 3, 2))
    weight[1] = 0
    return weight


INVERSES = {
    "invertible": (lambda: torch.randn(5, 5), True),
    "wide": (lambda: torch.randn(3, 6), False),
    "rank-deficient-zeros": (low_rank_with_zeros, False),
    "batch": (lambda: torch.stack([low_rank(4, 5, 2), low_rank(4, 5, 3)]), False),
    "all-zero": (lambda: torch.zeros(2, 3), None),
}

each_inverse = pytest.mark.parametrize(("build", "invertible"), INVERSES.values(), ids=INVERSES)


def distance(inverse: Tensor, wanted: Tensor, unit: Tensor) -> float:
    """Greatest entry of inverse − wanted once both are rid of their units, relative to the greatest of wanted."""
    return ((inverse - wanted) / unit).abs().max().item() / max((wanted / unit).abs().max().item(), 1e-300)


@each_inverse
def test_inverse_follows_a_change_of_units(build, invertible):
    weight = build()
    rows, columns = units(weight)
    rows, columns = rows * torch.randn_like(rows).sign(), columns * torch.randn_like(columns).sign()
    inverse = uc_inverse(scaled(weight, rows, columns))
    wanted = scaled(uc_inverse(weight), 1 / columns, 1 / rows)
    # Entries are compared in canonical units: a rounding of the inverse's greatest entry may be all of its least.
    base = rz_scaling(scaled(weight, rows, columns))
    unit = scaled(torch.ones_like(inverse), 1 / base.column_scale, 1 / base.row_scale)
    # The pseudo-inverse magnifies the 1e-14 of the canonical form by at most the condition number of W', below 1e3.
    assert distance(inverse, wanted, unit) <= 1e-11
    plain = distance(
        torch.linalg.pinv(scaled(weight, rows, columns), rtol=1e-13),
        scaled(torch.linalg.pinv(weight, rtol=1e-13), 1 / columns, 1 / rows),
        unit,
    )
    if invertible is False:
        assert plain > 1e-3


@each_inverse
def test_inverse_is_a_generalised_inverse(build, invertible):
    weight = build()
    inverse = uc_inverse(weight)
    assert (weight @ inverse @ weight - weight).abs().max() <= 1e-12 * weight.abs().max().clamp(min=1)
    assert (inverse @ weight @ inverse - inverse).abs().max() <= 1e-11 * inverse.abs().max().clamp(min=1)
    if invertible:
        assert (inverse @ weight - torch.eye(5)).abs().max() <= 1e-12
    elif invertible is False:
        pseudo = torch.linalg.pinv(weight, rtol=1e-13)
        assert (inverse - pseudo).abs().max() > 1e-3  # not Moore and Penrose's


def test_inverse_takes_a_cutoff():
    weight = torch.diag(torch.tensor([1.0, 1.0])) + 1e-4 * torch.randn(2, 2) + torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert torch.linalg.matrix_rank(uc_inverse(weight)) == 2
    assert torch.linalg.matrix_rank(uc_inverse(weight, rtol=1e-2)) == 1
