"""The attention benchmark runs, and its result is plain numbers that make a table."""

import json
import math

import pytest
import torch

from benchmarks.data import Dataset, load
from benchmarks.studies import attention


@pytest.fixture(scope="module")
def result():
    grids = {"adam": ((1e-3, 1e-2), (1.0,)), "sgd": ((0.3,), (1.0,))}
    digits = load("digits")
    few = Dataset(*(part[:160] for part in digits))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "load", lambda *_: few)
        measured = attention.compare(rounds=2, draws=2, epochs=1, seeds=2, shapes=((2, 4, 8, 2),), grids=grids)
    return {**measured, "environment": {"threads": 1, "torch": "2"}}


def test_result_is_plain_json_and_makes_three_tables(result):
    assert json.loads(json.dumps(result)) == result
    found = attention.section(result).text
    assert found.count("| --- |") >= 3
    for name in (*attention.METHODS, attention.FROZEN):
        assert name in found
    assert "nan" not in found


def test_alignment_knows_plain_from_ideal(result):
    single = {row["method"]: row for row in result["alignment"][0]["rows"]}
    assert single["ideal, joint (damping 0.001)"]["cosine"] > 0.95
    assert math.isclose(
        single["ideal, joint (damping 0.001)"]["cosine"], single["ideal, each sequence (damping 0.001)"]["cosine"],
        rel_tol=1e-3,
    )  # fmt: skip
    assert single["none"]["cosine"] < 0.9


def test_rate_is_chosen_by_validation_loss(result):
    for row in result["training"]:
        best = min(row["search"], key=lambda entry: entry["validation_loss"])
        assert (row["lr"], row["factor"]) == (best["lr"], best["factor"])


def test_methods_share_initialisation():
    def first(method):
        torch.manual_seed(0)
        return attention.RowClassifier(10, **attention.METHODS[method]).state_dict()

    plain = first("none")
    for method in attention.METHODS:
        assert all(torch.equal(tensor, plain[name]) for name, tensor in first(method).items())
