"""What a parameter step does to attention logits, and the step that does what it should."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ._logits import build, check, project, with_sequences
from ._map import PARAMETERS, LogitMap, arrange, disarrange
from ._rule import AttentionIdeal
from ._solve import solve


class Alignment(NamedTuple):
    """How a change of the logits compares with the ideal one, −g, per head.

    Args:
        cosine: of the angle between the two; 1 is the ideal direction, below 0 is uphill.
        gain: the length of the change along −g, in units of g; 1 is the ideal size.
    """

    cosine: Tensor
    gain: Tensor


class LogitStep(NamedTuple):
    """What `ideal_logit_step` found.

    Args:
        gradients: what stands in for the plain gradients, by name out of q_weight, k_weight, q_bias and k_bias;
            the step is minus them.
        misfit: |g − Jθ| / |g|, the part of g that was not reached; shape (heads,) if the sequences were joint,
            else (sequences, heads).
        residual: |Jᵀ(g − Jθ) − λθ| / |Jᵀg|, how far θ is from optimal; likewise.
    """

    gradients: dict[str, Tensor]
    misfit: Tensor
    residual: Tensor


def ideal_logit_step(
    input: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    grad_logits: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    *,
    num_heads: int,
    scale: float | None = None,
    mask: Tensor | None = None,
    rule: AttentionIdeal | None = None,
) -> LogitStep:
    r"""Return the gradients :math:`\theta = J^\top (JJ^\top + \lambda I)^{-1} g` that `AttentionIdeal` stands for.

    Args:
        input: X, shape (sequences, tokens, features) or (tokens, features).
        q_weight: shape (num_heads · head_dim, features); like the others below taken as trained.
        k_weight: likewise.
        grad_logits: g, shape (sequences, heads, tokens, tokens) or (heads, tokens, tokens).
        q_bias: shape (num_heads · head_dim,) or None.
        k_bias: likewise.
        num_heads: heads.
        scale: s; 1/√head_dim by default.
        mask: boolean, True where a logit counts.
        rule: damping, tolerance and so on; by default `AttentionIdeal(tolerance=None, max_iterations=1000)`.

    Raises:
        TypeError: input is not real floating-point, or the mask not boolean.
        ValueError: shapes do not fit.

    Example:
        >>> import torch
        >>> from adiv_optim import attention
        >>> x, w, g = torch.eye(2), torch.eye(2), torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
        >>> rule = attention.AttentionIdeal(damping=0.0)
        >>> found = attention.ideal_logit_step(x, w, w, g, num_heads=1, scale=1.0, rule=rule)
        >>> torch.allclose(found.gradients["q_weight"], g[0] / 2)  # the other half is k's
        True
    """
    rule = AttentionIdeal(tolerance=None, max_iterations=1000) if rule is None else rule
    weights = (q_weight, k_weight, q_bias, k_bias)
    logit_map = _linearise(input, weights, grad_logits, num_heads, scale, mask, rule.joint)
    right = logit_map.masked(arrange(with_sequences(grad_logits, 4).detach().to(logit_map.rows.dtype), rule.joint))
    parts = solve(logit_map, right, rule.damping, rule.tolerance, rule.max_iterations)
    left = right - logit_map.forward(parts)
    ridge = (rule.damping * logit_map.mean_eigenvalue())[..., None, None]
    slope, plain = logit_map.adjoint(left), logit_map.adjoint(right)
    gradients = {
        name: gradient.to(weights[PARAMETERS.index(name)].dtype)  # type: ignore[union-attr]
        for name, gradient in logit_map.gradients(parts).items()
    }
    misfit = _ratio(_norm([left]), _norm([right]))
    residual = _ratio(_norm([slope[side] - ridge * part for side, part in parts.items()]), _norm(list(plain.values())))
    several = not rule.joint and input.dim() == 3
    return LogitStep(gradients, misfit if several else misfit[0], residual if several else residual[0])


def effective_logit_update(
    input: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    grad_logits: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    *,
    num_heads: int,
    scale: float | None = None,
    mask: Tensor | None = None,
    gradients: Mapping[str, Tensor] | None = None,
) -> Tensor:
    r"""Return how a unit step along −gradients changes the logits to first order.

    For plain gradients of one sequence :math:`-s^2 (A g B + C g A)` (Bird 2025, Eq. 63 to first order, with the
    second term's indices put right); sequences of a batch add what they pull on each other. The ideal change is −g:
    `alignment` compares the two.

    Args:
        input: X, shape (sequences, tokens, features) or (tokens, features).
        q_weight: shape (num_heads · head_dim, features).
        k_weight: likewise.
        grad_logits: g, shape (sequences, heads, tokens, tokens) or (heads, tokens, tokens).
        q_bias: shape (num_heads · head_dim,) or None.
        k_bias: likewise.
        num_heads: heads.
        scale: s; 1/√head_dim by default.
        mask: boolean, True where a logit counts; elsewhere the change is given as 0.
        gradients: of q_weight, k_weight and the biases there are, in place of the plain ones. One that is missing
            is zero.

    Returns:
        The change, of the shape of `grad_logits`.

    Raises:
        TypeError: input is not real floating-point, or the mask not boolean.
        ValueError: shapes do not fit, or `gradients` has one of a parameter that is not there.

    Example:
        >>> import torch
        >>> from adiv_optim import attention
        >>> x, w = torch.tensor([[2.0]]), torch.tensor([[3.0]])  # A = 4, B = C = 36
        >>> attention.effective_logit_update(x, w, w, torch.ones(1, 1, 1), num_heads=1)
        tensor([[[-288.]]])
    """
    weights = (q_weight, k_weight, q_bias, k_bias)
    logit_map = _linearise(input, weights, grad_logits, num_heads, scale, mask, joint=True)
    if gradients is None:
        parts = logit_map.adjoint(arrange(with_sequences(grad_logits, 4).detach().to(logit_map.rows.dtype), joint=True))
    else:
        if unknown := sorted(gradients.keys() - logit_map.trained):
            raise ValueError(f"attention: gradients has {unknown}; the parameters are {sorted(logit_map.trained)}.")
        present = {name: weight for name, weight in zip(PARAMETERS, weights, strict=True) if weight is not None}
        parts = logit_map.parts({name: gradients.get(name, torch.zeros_like(w)) for name, w in present.items()})
    change = disarrange(logit_map.forward(parts), joint=True)
    return -(change if input.dim() == 3 else change.squeeze(0)).to(grad_logits.dtype)


def alignment(change: Tensor, grad_logits: Tensor, mask: Tensor | None = None) -> Alignment:
    """Compare a change of the logits with the ideal one, −g, per head.

    Args:
        change: what `effective_logit_update` returns.
        grad_logits: g, of the same shape, (sequences, heads, tokens, tokens) or (heads, tokens, tokens).
        mask: boolean, True where a logit counts.

    Returns:
        Cosine and gain, each of shape (heads,); NaN for a head whose g is zero.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> from adiv_optim import attention
        >>> attention.alignment(torch.tensor([[[-2.0, 0.0]]]), torch.tensor([[[1.0, 0.0]]]))
        Alignment(cosine=tensor([1.]), gain=tensor([2.]))
    """
    if change.shape != grad_logits.shape:
        raise ValueError(
            f"attention: change has shape {tuple(change.shape)} and grad_logits {tuple(grad_logits.shape)}; they must "
            "be the same logits."
        )
    if mask is not None:
        change, grad_logits = change.masked_fill(~mask, 0), grad_logits.masked_fill(~mask, 0)
    moved, wanted = (with_sequences(tensor, 4).transpose(0, 1).flatten(1) for tensor in (-change, grad_logits))
    along = (moved * wanted).sum(1)
    return Alignment(along / (moved.norm(dim=1) * wanted.norm(dim=1)), along / wanted.square().sum(1))


def _linearise(
    input: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    grad_logits: Tensor,
    num_heads: int,
    scale: float | None,
    mask: Tensor | None,
    joint: bool,
) -> LogitMap:
    scale = check(input, *weights, num_heads, scale, mask)
    tokens = input.shape[-2]
    wanted = (*input.shape[:-2], num_heads, tokens, tokens)
    if grad_logits.shape != wanted:
        raise ValueError(
            f"attention: grad_logits has shape {tuple(grad_logits.shape)}; that of the logits is {wanted}."
        )
    with torch.no_grad():
        q_weight, k_weight, q_bias, k_bias = weights
        rows = input.detach()
        queries, keys = project(rows, q_weight, q_bias, num_heads), project(rows, k_weight, k_bias, num_heads)
    trained = frozenset(name for name, weight in zip(PARAMETERS, weights, strict=True) if weight is not None)
    return build(rows, queries, keys, scale, mask, trained, joint)


def _norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.flatten(2).norm(dim=2) for tensor in tensors]).norm(dim=0)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator == 0, torch.zeros_like(numerator), numerator / denominator)
