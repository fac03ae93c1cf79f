"""Conjugate gradients behind gauge.rz_scaling: of chains, which take them longest."""

import pytest

from adiv_optim.gauge import log_least_squares, rz_scaling
from tests.helpers.matrices import (
    INVARIANCE,
    MEANS,
    bidiagonal,
    deviation_of_means,
    largest_ratio,
    scaled,
    swept,
    units,
)

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize("length", [60, 200])
def test_work_on_a_chain_is_bounded(length, monkeypatch):
    """34,781 sweeps are what alternation takes for a bidiagonal matrix of 60; here steps are counted, not seconds."""
    products = []
    original = log_least_squares._apply
    monkeypatch.setattr(log_least_squares, "_apply", lambda *args: products.append(1) or original(*args))
    weight = bidiagonal(length)
    found = rz_scaling(weight)
    assert len(products) <= 10 * length
    assert deviation_of_means(found.canonical) <= MEANS
    assert deviation_of_means(swept(weight, 300)) > MEANS
    assert largest_ratio(rz_scaling(scaled(weight, *units(weight))).canonical, found.canonical) <= INVARIANCE
