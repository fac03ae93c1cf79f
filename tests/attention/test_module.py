"""SelfAttention, against torch's own, and what its errors say."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from adiv_optim import BatchIdeal, Proportional, attach, coverage
from adiv_optim.attention import (
    AttentionIdeal,
    LogitProjection,
    SelfAttention,
    alignment,
    effective_logit_update,
    ideal_logit_step,
    logits,
)
from tests.helpers.cases import relative_error

pytestmark = pytest.mark.usefixtures("in_float64")

# The module


@pytest.mark.parametrize(("bias", "causal"), [(True, True), (False, False)], ids=["bias-causal", "full"])
@pytest.mark.parametrize("correction", [None, AttentionIdeal()], ids=["plain", "ideal"])
def test_module_is_torchs_multihead_attention(bias, causal, correction):
    mha = nn.MultiheadAttention(8, 2, bias=bias, batch_first=True)
    if bias:
        nn.init.normal_(mha.in_proj_bias)
        nn.init.normal_(mha.out_proj.bias)
    x = torch.randn(3, 5, 8)
    mask = ~torch.ones(5, 5).tril().bool() if causal else None
    wanted = mha(x, x, x, attn_mask=mask, need_weights=False)[0]
    layer = SelfAttention.from_torch(mha, correction=correction, causal=causal)
    assert relative_error(layer(x), wanted) <= 1e-12
    assert relative_error(layer(x[0]), wanted[0]) <= 1e-12
    other = SelfAttention.from_torch(mha, correction=correction, causal=not causal)
    assert relative_error(other(x), wanted) > 1e-3


def test_module_starts_as_torchs_does():
    torch.manual_seed(1)
    layer, mha = SelfAttention(64, 4), nn.MultiheadAttention(64, 4)
    ours = torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)])
    assert (ours.std() / mha.in_proj_weight.std() - 1).abs() < 0.03
    assert (ours.abs().max() / mha.in_proj_weight.abs().max() - 1).abs() < 0.01
    assert (layer.out_proj.weight.std() / mha.out_proj.weight.std() - 1).abs() < 0.05


def test_state_moves_between_plain_and_corrected():
    plain, ideal = SelfAttention(8, 2), SelfAttention(8, 2, correction=AttentionIdeal())
    ideal.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    assert torch.equal(plain(x), ideal(x))
    again = functional_call(ideal, dict(plain.named_parameters()), (x,))
    assert torch.equal(plain(x), again)


def test_corrected_module_gives_the_value_path_plain_gradients():
    plain, ideal = SelfAttention(8, 2), SelfAttention(8, 2, correction=AttentionIdeal())
    ideal.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    for layer in (plain, ideal):
        layer(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        error = relative_error(ideal.get_parameter(name).grad, parameter.grad)
        assert error == 0 if name.startswith(("v_", "out_")) else error > 1e-3


def test_attach_corrects_value_and_output_and_leaves_query_and_key():
    model = nn.Sequential(SelfAttention(8, 2, correction=AttentionIdeal()))
    attach(model, Proportional())
    assert type(model[0].q_proj) is type(model[0].k_proj) is LogitProjection
    model(torch.randn(2, 5, 8)).square().sum().backward()
    report = coverage(model)
    rules = {name.split(".")[1]: how for name, how in report.treated.items()}
    own, ideal = "corrected by Proportional", "corrected by AttentionIdeal"
    assert rules == {"v_proj": own, "out_proj": own, "q_proj": ideal, "k_proj": ideal}
    assert report.never_seen == report.skipped == {}
    attach(
        nn.Sequential(SelfAttention(8, 2, correction=AttentionIdeal())), Proportional(), strict=True
    )  # none is plain
    plain = attach(SelfAttention(8, 2), Proportional())
    plain(torch.randn(2, 5, 8)).square().sum().backward()
    assert len(coverage(plain).treated) == 8


def test_query_norm_makes_the_size_of_the_weights_irrelevant():
    normed, plain = SelfAttention(8, 2, qk_norm=True), SelfAttention(8, 2)
    x = torch.randn(2, 5, 8)
    for layer, same in ((normed, True), (plain, False)):
        before = layer(x)
        with torch.no_grad():
            layer.q_proj.weight.mul_(3)
        assert (relative_error(layer(x), before) <= 1e-10) == same


# Errors


def test_errors_say_what_was_found_and_what_to_do():
    x, w, b = torch.randn(2, 4, 6), torch.randn(6, 6), torch.randn(6)
    for call, kind, message in (
        (lambda: logits(torch.ones(2, 4, 6).long(), w, w, num_heads=2), TypeError, "input is torch.int64"),
        (lambda: logits(x[0, 0], w, w, num_heads=2), ValueError, "has 1 dimensions; it must have 3"),
        (lambda: logits(x, w[:, :5], w, num_heads=2), ValueError, r"q_weight of shape \(6, 5\) does not take the 6"),
        (lambda: logits(x, w, w[:4], num_heads=2), ValueError, "must have one shape"),
        (lambda: logits(x, w, w, num_heads=4), ValueError, "num_heads is 4, which does not divide the 6 rows"),
        (lambda: logits(x, w, w, num_heads=0), ValueError, "num_heads is 0"),
        (lambda: logits(x, w, w, b, b[:3], num_heads=2), ValueError, r"k_bias has shape \(3,\); it must be \(6,\)"),
        (lambda: logits(x, w, w, num_heads=2, mask=torch.ones(4, 4)), TypeError, "it must be torch.bool"),
        (lambda: logits(x, w, w, num_heads=2, mask=torch.ones(5, 4).bool()), ValueError, "does not broadcast"),
        (lambda: logits(x, w, w, num_heads=2, correction=BatchIdeal()), TypeError, "is BatchIdeal"),
        (lambda: logits(x, w, w, num_heads=2, correction=AttentionIdeal), TypeError, r"write AttentionIdeal\(\)"),
        (lambda: effective_logit_update(x, w, w, x, num_heads=2), ValueError, r"that of the logits is \(2, 2, 4, 4\)"),
        (lambda: ideal_logit_step(x, w, w, x, num_heads=2), ValueError, r"grad_logits has shape \(2, 4, 6\)"),
        (
            lambda: effective_logit_update(x, w, w, torch.ones(2, 2, 4, 4), num_heads=2, gradients={"q_bias": b}),
            ValueError,
            r"gradients has \['q_bias'\]",
        ),
        (lambda: alignment(x, w), ValueError, "they must be the same logits"),
        (lambda: AttentionIdeal(damping=-1.0), ValueError, "damping is -1.0; it must be finite and at least 0"),
        (lambda: AttentionIdeal(damping=math.nan), ValueError, "damping is nan"),
        (lambda: AttentionIdeal(tolerance=-1.0), ValueError, "tolerance is -1.0"),
        (lambda: AttentionIdeal(max_iterations=0), ValueError, "max_iterations is 0"),
        (lambda: SelfAttention(6, 4), ValueError, "num_heads is 4, which does not divide embed_dim 6"),
        (lambda: SelfAttention(6, 2, qk_norm=True, correction=AttentionIdeal()), ValueError, "bilinear"),
        (lambda: SelfAttention(6, 2, correction=Proportional()), TypeError, "use adiv_optim.attach"),
        (lambda: SelfAttention(6, 2)(w[None, None]), ValueError, r"input of shape \(1, 1, 6, 6\)"),
        (lambda: SelfAttention(6, 2, correction=AttentionIdeal()).q_proj(x), RuntimeError, "not called by itself"),
        (lambda: SelfAttention.from_torch(nn.MultiheadAttention(6, 2, dropout=0.1)), ValueError, "uses dropout"),
        (lambda: SelfAttention.from_torch(nn.MultiheadAttention(6, 2, kdim=3)), ValueError, "uses kdim or vdim"),
    ):
        with pytest.raises(kind, match=message):
            call()
