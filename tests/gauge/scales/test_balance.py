"""Conjugate gradients and the factorisation behind gauge.rz_scaling, and the components of a support."""

import math

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

# Conjugate gradients and the factorisation


@pytest.fixture
def solvers(monkeypatch):
    """What was called, with conjugate gradients tried at every size."""
    calls = []
    monkeypatch.setattr(balance, "DIRECT", 0)
    for name in ("conjugate_gradients", "_factor"):
        original = getattr(balance, name)

        def traced(*args, name=name, original=original):
            result = original(*args)
            calls.append((name, result[1] if name == "conjugate_gradients" else True))
            return result

        monkeypatch.setattr(balance, name, traced)
    return calls


@pytest.mark.parametrize("name", [*SOME, "batch", "number"])
def test_conjugate_gradients_agree_with_the_factorisation(name, solvers, monkeypatch):
    weight = MATRICES[name]()
    found = rz_scaling(weight)
    assert ("_factor", True) not in solvers
    monkeypatch.setattr(balance, "DIRECT", math.inf)
    direct = rz_scaling(weight)
    for part, other in zip(found, direct, strict=True):
        assert largest_ratio(part, other) <= INVARIANCE
    assert deviation_of_means(found.canonical) <= MEANS


def test_a_long_chain_falls_back_on_the_factorisation(solvers):
    weight = bidiagonal(200)
    found = rz_scaling(weight)
    assert solvers == [("conjugate_gradients", False), ("_factor", True)]
    assert deviation_of_means(found.canonical) <= MEANS
    assert largest_ratio(rz_scaling(scaled(weight, *units(weight))).canonical, found.canonical) <= 10 * INVARIANCE


def test_work_on_a_chain_is_bounded(solvers, monkeypatch):
    """34,781 sweeps are what alternation takes for a bidiagonal matrix of 60; here steps are counted, not seconds."""
    products = []
    original = balance._apply
    monkeypatch.setattr(balance, "_apply", lambda *args: products.append(1) or original(*args))
    monkeypatch.setattr(balance, "DIRECT", 256)
    assert deviation_of_means(rz_scaling(bidiagonal(60)).canonical) <= MEANS
    assert solvers == [("_factor", True)]
    assert len(products) <= 10
    assert deviation_of_means(swept(bidiagonal(60), 300)) > MEANS


@pytest.mark.parametrize("length", [1, 2, 17, 300])
def test_components_of_shuffled_chains(length):
    order = torch.randperm(2 * length + 3)
    adjacent = torch.eye(2 * length + 3, dtype=torch.bool)
    for first in (0, length):
        path = order[first : first + length]
        adjacent[path[:-1], path[1:]] = adjacent[path[1:], path[:-1]] = True
    (label,) = balance._components(adjacent[None])
    groups = [order[:length], order[length : 2 * length], *order[2 * length :].split(1)]
    for group in groups:
        assert (label[group] == group.min()).all()
    assert len(label.unique()) == len(groups)
