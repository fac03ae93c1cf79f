"""Attention logits of nothing."""

import pytest
import torch

from adiv_optim.attention import AttentionIdeal, logits


@pytest.mark.parametrize("shape", [(0, 4, 6), (2, 0, 6), (0, 6)], ids=["no-sequences", "no-tokens", "one-sequence"])
@pytest.mark.parametrize("rule", [AttentionIdeal(), AttentionIdeal(0.0), AttentionIdeal(joint=False)], ids=str)
def test_nothing_gives_zero_gradients_under_every_rule(shape, rule):
    weight = torch.randn(6, 6, requires_grad=True)
    logits(torch.randn(shape), weight, weight, num_heads=2, correction=rule).sum().backward()
    assert weight.grad.abs().max() == 0
