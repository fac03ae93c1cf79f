"""Effective updates, misfit and alignment of attention logits."""

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vjp

from adiv_optim.attention import (
    AttentionIdeal,
    alignment,
    effective_logit_update,
    ideal_logit_step,
)
from tests.helpers.attention import CONVERGED, EXACT, REACHABLE, UNREACHABLE, Case, each_case
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired

pytestmark = pytest.mark.usefixtures("in_float64")

# The diagnostics


@each_case
def test_effective_update_is_jvp_of_vjp(case):
    input, parameters, g = case.make()

    def plain(p: dict[str, Tensor]) -> Tensor:
        return case.plain(input, p)

    gradients = vjp(plain, parameters)[1](g)[0]
    wanted = -jvp(plain, (parameters,), (gradients,))[1]
    keywords = {"num_heads": case.heads, "mask": case.mask}
    found = effective_logit_update(input, grad_logits=g, **parameters, **keywords)
    assert relative_error(found, wanted) <= 1e-12
    given = effective_logit_update(input, grad_logits=g, **parameters, **keywords, gradients=gradients)
    assert relative_error(given, wanted) <= 1e-12
    other = effective_logit_update(input, grad_logits=g, **parameters, **keywords, scale=1.0)
    assert relative_error(other, wanted) > 0.1


def test_effective_update_of_one_sequence_is_the_formula_of_the_paper():
    case = Case()
    input, parameters, g = case.make()
    x = torch.cat([input, torch.ones(case.tokens, 1)], 1)
    found = effective_logit_update(input, grad_logits=g, **parameters, num_heads=case.heads)
    for head in range(case.heads):
        rows = slice(head * case.head_dim, (head + 1) * case.head_dim)
        q, k = (input @ parameters[f"{s}_weight"][rows].mT + parameters[f"{s}_bias"][rows] for s in ("q", "k"))
        a, b, c = x @ x.mT, k @ k.mT, q @ q.mT
        assert relative_error(found[head], -(a @ g[head] @ b + c @ g[head] @ a) / case.head_dim) <= 1e-12
        # Eq. 63 as printed has B and C the other way round.
        assert relative_error(found[head], -(a @ g[head] @ c + b @ g[head] @ a) / case.head_dim) > 0.1


@paired("case joint", REACHABLE | UNREACHABLE, {"joint": True, "alone": False})
def test_ideal_step_is_what_a_backward_leaves(case, joint):
    input, parameters, g = case.make()
    rule = AttentionIdeal(1e-2, joint=joint, **CONVERGED)
    found = ideal_logit_step(input, grad_logits=g, **parameters, num_heads=case.heads, mask=case.mask, rule=rule)
    left = case.step(input, parameters, g, rule)
    assert found.gradients.keys() == parameters.keys()
    for name, gradient in found.gradients.items():
        assert relative_error(gradient, left[name]) <= 1e-12
    heads = (case.heads,) if joint or not case.sequences else (case.sequences, case.heads)
    assert found.misfit.shape == found.residual.shape == heads
    assert found.residual.max() <= EXACT
    assert 0 < found.misfit.min() <= found.misfit.max() < 1


def test_misfit_is_zero_where_logits_can_be_reached_and_not_elsewhere():
    def misfit(case: Case) -> float:
        input, parameters, g = case.make()
        rule = AttentionIdeal(0.0, **CONVERGED)
        return ideal_logit_step(input, grad_logits=g, **parameters, num_heads=case.heads, rule=rule).misfit.max().item()

    assert misfit(REACHABLE["sixteen-tokens"]) <= 1e-9
    assert misfit(UNREACHABLE["head-dim-8"]) > 0.1


def test_alignment_of_plain_and_ideal():
    case = REACHABLE["sixteen-tokens"]
    input, parameters, g = case.make()
    keywords = {"grad_logits": g, **parameters, "num_heads": case.heads}
    step = ideal_logit_step(input, **keywords, rule=AttentionIdeal(0.0, **CONVERGED)).gradients
    ideal = alignment(effective_logit_update(input, **keywords, gradients=step), g)
    assert (ideal.cosine - 1).abs().max() <= EXACT
    assert (ideal.gain - 1).abs().max() <= EXACT
    plain = alignment(effective_logit_update(input, **keywords), g)
    assert plain.cosine.max() < 0.9
    assert plain.cosine.shape == plain.gain.shape == (case.heads,)
    assert (alignment(g, g).cosine + 1).abs().max() <= EXACT


@pytest.mark.parametrize("name", ["q_weight", "k_bias"])
def test_gradient_of_another_shape_is_named(name):
    x, w = torch.ones(4, 2), torch.ones(2, 2)
    given = {"grad_logits": torch.ones(1, 4, 4), "k_bias": torch.zeros(2), "num_heads": 1}
    with pytest.raises(ValueError, match=rf"gradients\[{name!r}\] has shape \(3,\); it must be that of {name}, "):
        effective_logit_update(x, w, w, **given, gradients={name: torch.ones(3)})
