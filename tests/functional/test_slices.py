"""Work that is cut into slices gives what it gives in one piece, the last and shorter slice included."""

import pytest
import torch
from torch import nn

from adiv_optim import BatchIdeal, Disproportional, Proportional, Whitened, attach, functional
from adiv_optim.diagnostics import _rows, divergence
from adiv_optim.functional import patches, shared
from adiv_optim.functional.patches import cross_gram
from adiv_optim.layers import AffineLikeLinear
from tests.helpers.cases import gradients, relative_error
from tests.helpers.remembered import covariance_of, rows_counted

EXACT = 1e-10  # float64

pytestmark = pytest.mark.usefixtures("in_float64")

#: With patches of three positions, a quarter of 25 samples makes slices of two.
SAMPLES, SIZES = 25, [2] * 12 + [1]


def layer():
    return nn.Conv1d(4, 6, 3, padding=1, groups=2)


def input():
    return torch.randn(SAMPLES, 4, 5)


def corrected(layer, x, g, rule):
    return gradients(functional.conv1d(x, layer.weight, layer.bias, 1, 1, 1, 2, rule), layer, g)


def agree(found, wanted):
    assert found.keys() == wanted.keys()
    for name in found:
        assert relative_error(found[name], wanted[name]) <= EXACT, name


@pytest.mark.parametrize("rule", [Proportional(), Disproportional()], ids=["one-scale", "two-scales"])
def test_rescaled_slices_of_a_convolution_add_up(monkeypatch, rule):
    one, x, g = layer(), input(), torch.randn(SAMPLES, 6, 5)
    whole = corrected(one, x, g, rule)
    monkeypatch.setattr(shared, "SLICE_NUMBERS", 4)
    monkeypatch.setattr(shared, "SLICES", 4)
    assert [len(g[part]) for part in shared.batch_slices(g)] == [7, 7, 7, 4]
    agree(corrected(one, x, g, rule), whole)


def in_slices_of_patches(monkeypatch, x):
    monkeypatch.setattr(patches, "PATCH_NUMBERS", 4)
    cut = patches.Patches(x, (3,), patches.Geometry((1,), (1,), (1,), 2))
    parts = [*cut.slices(x.dtype)]
    assert [len(part.input) for part in parts] == SIZES
    assert torch.equal(torch.cat([part.unfold() for part in parts], 1), cut.unfold())


def test_gram_matrices_of_patches_add_up(monkeypatch):
    one, x, g = layer(), input(), torch.randn(SAMPLES, 6, 5)
    whole = corrected(one, x, g, BatchIdeal(0.1))
    in_slices_of_patches(monkeypatch, x)
    agree(corrected(one, x, g, BatchIdeal(0.1)), whole)


def test_covariance_of_patches_adds_up(monkeypatch):
    def covariance():
        optimizer = Whitened(torch.optim.SGD(one.parameters(), lr=0.1), one, every=1, graft_norm=False)
        one(x).sum().backward()
        optimizer.step()
        assert rows_counted(optimizer) == {"weight": SAMPLES * 5}
        found = covariance_of(optimizer, one)
        level = found.diagonal(dim1=1, dim2=2).mean()
        assert optimizer.metrics()["Whitened/weight/input_rms"] == pytest.approx(level.sqrt().item())
        return {"A": found}

    one, x = layer(), input()
    whole = covariance()
    in_slices_of_patches(monkeypatch, x)
    agree(covariance(), whole)


def measured(one, x, g, **options):
    found = divergence(one, lambda z, g: (z * g).sum(), x, g, **options).layers[""]
    names = ("index", "squared_norm", "gain", "cosine", "projection", "interference")
    return {name: getattr(found, name) for name in names}


@pytest.mark.parametrize("max_rows", [1000, 22], ids=["all", "some"])
def test_measured_patches_are_all_found(monkeypatch, max_rows):
    one, x, g = layer(), input(), torch.randn(SAMPLES, 6, 5)
    whole = measured(one, x, g, max_rows=max_rows)
    in_slices_of_patches(monkeypatch, x)
    agree(measured(one, x, g, max_rows=max_rows), whole)


def test_rows_that_are_asked_for_one_by_one_are_all_answered(monkeypatch):
    one, x, g = attach(layer(), BatchIdeal(0.1)), input()[:11], torch.randn(11, 6, 5)
    whole = measured(one, x, g)
    monkeypatch.setattr(_rows, "UNIT_NUMBERS", 4 * 2 * 11 * 5)  # four of 55 rows
    agree(measured(one, x, g), whole)


def test_contributions_of_all_rows_are_measured(monkeypatch):
    one, x, g = AffineLikeLinear(5, 3), torch.randn(11, 5), torch.randn(11, 3)
    whole = measured(one, x, g)
    monkeypatch.setattr(_rows, "CONTRIBUTION_NUMBERS", 4 * 18)  # four of eleven rows
    agree(measured(one, x, g), whole)


def test_products_over_many_rows_are_summed_to_the_last_row():
    left, right = torch.randn(150, 4), torch.randn(150, 3)
    assert relative_error(cross_gram([left], [right]), left.T @ right) <= EXACT
    assert relative_error(left[:128].T @ right[:128], left.T @ right) > 1e-3
