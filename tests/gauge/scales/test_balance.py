"""Conjugate gradients behind gauge.rz_scaling: of matrices with zeros, and of chains, which take them longest."""

import pytest
import torch

from adiv_optim.gauge import rz_scaling
from adiv_optim.gauge.scales import balance
from tests.helpers.matrices import (
    INVARIANCE,
    MATRICES,
    MEANS,
    SOME,
    bidiagonal,
    deviation_of_means,
    largest_ratio,
    scaled,
    swept,
    units,
)

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize("name", [*SOME, "batch", "number"])
def test_scales_are_those_of_a_dense_least_squares_solution(name):
    weight = MATRICES[name]()
    found = rz_scaling(weight)
    assert deviation_of_means(found.canonical) <= MEANS
    scales = (part.reshape(-1, part.shape[-1]) for part in (found.row_scale, found.column_scale))
    for matrix, rows, columns in zip(weight.reshape(-1, *weight.shape[-2:]), *scales, strict=True):
        at = (matrix != 0).nonzero()
        ends = torch.cat([torch.eye(len(rows))[at[:, 0]], torch.eye(len(columns))[at[:, 1]]], 1)
        logs = torch.cat([rows.log(), columns.log()])
        wanted = torch.linalg.lstsq(ends, matrix[matrix != 0].abs().log(), driver="gelsd").solution
        assert torch.allclose(ends @ logs, ends @ wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [60, 200])
def test_work_on_a_chain_is_bounded(length, monkeypatch):
    """34,781 sweeps are what alternation takes for a bidiagonal matrix of 60; here steps are counted, not seconds."""
    products = []
    original = balance._apply
    monkeypatch.setattr(balance, "_apply", lambda *args: products.append(1) or original(*args))
    weight = bidiagonal(length)
    found = rz_scaling(weight)
    assert len(products) <= 10 * length
    assert deviation_of_means(found.canonical) <= MEANS
    assert deviation_of_means(swept(weight, 300)) > MEANS
    assert largest_ratio(rz_scaling(scaled(weight, *units(weight))).canonical, found.canonical) <= INVARIANCE
