"""Solving for the step of attention logits: a system that has no factor."""

import torch

from adiv_optim.attention._map import LogitMap
from adiv_optim.attention._solve import dense


def test_system_that_rounding_has_made_indefinite_gives_nan(monkeypatch):
    """What Cholesky leaves of a matrix that has no factor are finite numbers."""
    ones, factor = torch.ones(1, 3, 1), torch.linalg.cholesky_ex
    logit_map = LogitMap(ones, ones[:, None], ones[:, None], 1.0, None, frozenset({"q_weight"}), True)
    right = logit_map.vector(torch.ones(1, 1, 3, 3))
    assert dense(logit_map, right, 1.0)["q"].isfinite().all()
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda kernel: factor(kernel - 3 * torch.eye(9)))
    assert dense(logit_map, right, 1.0)["q"].isnan().all()
