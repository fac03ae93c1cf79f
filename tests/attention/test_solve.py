"""Solving for the step of attention logits: a system that has no factor."""

import torch

from adiv_optim.attention._map import LogitMap
from adiv_optim.attention._solve import dense


def test_system_without_a_factor_gives_nan():
    """All entries of JJᵀ are 1, so that the second pivot is exactly 0 without damping; with it there is a factor."""
    ones = torch.ones(1, 3, 1)
    logit_map = LogitMap(ones, ones[:, None], ones[:, None], 1.0, None, frozenset({"q_weight"}), True)
    right = logit_map.vector(torch.ones(1, 1, 3, 3))
    assert dense(logit_map, right, 0.0)["q"].isnan().all()
    assert dense(logit_map, right, 1.0)["q"].isfinite().all()
