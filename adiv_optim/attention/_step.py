"""The change that a parameter step makes to attention logits, and the step whose change is ideal."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._map import LogitMap
from ._projections import Projections
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
    """The result of `ideal_logit_step`.

    Args:
        gradients: the stand-ins for the plain gradients, by name out of q_weight, k_weight, q_bias and k_bias; the
            step is minus them.
        misfit: |g − Jθ| / |g|, the part of g that was not reached; shape (heads,) if the sequences were joint,
            else (sequences, heads).
        residual: |Jᵀ(g − Jθ) − λθ| / |Jᵀg|, how far θ is from optimal; likewise.
    """

    gradients: dict[str, Tensor]
    misfit: Tensor
    residual: Tensor


def ideal_logit_step(
    input: Tensor, q_weight: Tensor, k_weight: Tensor, grad_logits: Tensor,
    q_bias: Tensor | None = None, k_bias: Tensor | None = None, *, num_heads: int,
    scale: float | None = None, mask: Tensor | None = None, rule: AttentionIdeal | None = None,
) -> LogitStep:  # fmt: skip
    r"""Return the gradients :math:`\theta = J^\top (JJ^\top + \lambda I)^{-1} g` that `AttentionIdeal` stands for.

    Input, weights, biases, heads, scale and mask are those of `logits`; all parameters are taken as trained.
    `grad_logits` is g, shape (sequences, heads, tokens, tokens) or (heads, tokens, tokens); `rule` is
    `AttentionIdeal(tolerance=None, max_iterations=1000)` by default.

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
    given = Projections(input, q_weight, k_weight, q_bias, k_bias, num_heads, scale, mask)
    logit_map, right = _linearised(given, grad_logits, rule.joint)
    parts = solve(logit_map, right, rule)
    left = right - logit_map.forward(parts)
    ridge = (rule.damping * logit_map.mean_eigenvalue())[..., None, None]
    slope = logit_map.adjoint(left)
    misfit = _ratio([left], [right])
    residual = _ratio([slope[s] - ridge * part for s, part in parts.items()], logit_map.adjoint(right).values())
    gradients = {name: found.to(given.parameters[name].dtype) for name, found in logit_map.gradients(parts).items()}
    several = not rule.joint and input.dim() == 3
    return LogitStep(gradients, misfit if several else misfit[0], residual if several else residual[0])


def effective_logit_update(
    input: Tensor, q_weight: Tensor, k_weight: Tensor, grad_logits: Tensor,
    q_bias: Tensor | None = None, k_bias: Tensor | None = None, *, num_heads: int,
    scale: float | None = None, mask: Tensor | None = None, gradients: Mapping[str, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    r"""Return how a unit step along −gradients changes the logits to first order.

    For plain gradients of one sequence :math:`-s^2 (A g B + C g A)` (Bird 2025, Eq. 63 to first order, with the
    second term's indices put right); sequences of a batch pull on each other. The ideal change is −g:
    `alignment` compares the two.

    Input, weights, biases, heads, scale and mask are those of `logits`; where the mask is False the change is given as
    0. `grad_logits` is g, shape (sequences, heads, tokens, tokens) or (heads, tokens, tokens); `gradients`, by name out
    of q_weight, k_weight, q_bias and k_bias, stand in for the plain ones, and one that is missing is zero.

    Returns:
        The change, of the shape of `grad_logits`.

    Raises:
        TypeError: input is not real floating-point, or the mask not boolean.
        ValueError: shapes do not fit, or `gradients` has one of a parameter that is not there, or of another shape.

    Example:
        >>> import torch
        >>> from adiv_optim import attention
        >>> x, w = torch.tensor([[2.0]]), torch.tensor([[3.0]])  # A = 4, B = C = 36
        >>> attention.effective_logit_update(x, w, w, torch.ones(1, 1, 1), num_heads=1)
        tensor([[[-288.]]])
    """
    given = Projections(input, q_weight, k_weight, q_bias, k_bias, num_heads, scale, mask)
    logit_map, right = _linearised(given, grad_logits, joint=True)
    if gradients is None:
        gradients = logit_map.gradients(logit_map.adjoint(right))
    elif unknown := sorted(gradients.keys() - logit_map.trained):
        raise ValueError(f"attention: gradients has {unknown}; the parameters are {sorted(logit_map.trained)}.")
    for name, gradient in gradients.items():
        if gradient.shape != given.parameters[name].shape:
            raise ValueError(
                f"attention: gradients[{name!r}] has shape {tuple(gradient.shape)}; it must be that of {name}, "
                f"{tuple(given.parameters[name].shape)}."
            )
    tensors = {name: gradients.get(name, torch.zeros_like(old)) for name, old in given.parameters.items()}
    wide: dict[str, Any] = {n: t.to(logit_map.dtype) for n, t in {**tensors, "input": input.detach()}.items()}
    moved_queries, moved_keys = replace(given, **wide).projected()
    queries, keys = logit_map.queries.to(logit_map.dtype), logit_map.keys.to(logit_map.dtype)
    change = -given.factor * (moved_queries @ keys.mT + queries @ moved_keys.mT)
    return (change if mask is None else change.masked_fill(~mask, 0)).to(grad_logits.dtype)


def alignment(change: Tensor, grad_logits: Tensor, mask: Tensor | None = None) -> Alignment:
    """Compare a change of the logits with the ideal one, −g, per head.

    Args:
        change: the result of `effective_logit_update`.
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
    heads = change.dim() - 3
    moved, wanted = (tensor.movedim(heads, 0).flatten(1) for tensor in (-change, grad_logits))
    along = (moved * wanted).sum(1)
    return Alignment(along / (moved.norm(dim=1) * wanted.norm(dim=1)), along / wanted.square().sum(1))


@torch.no_grad()
def _linearised(given: Projections, grad_logits: Tensor, joint: bool) -> tuple[LogitMap, Tensor]:
    """The derivative by all parameters, and g as it takes it."""
    if grad_logits.shape != given.shape:
        raise ValueError(
            f"attention: grad_logits has shape {tuple(grad_logits.shape)}; that of the logits is {given.shape}."
        )
    trained, input = frozenset(given.parameters), given.input.detach()
    logit_map = LogitMap(input, *given.projected(), given.factor, given.mask, trained, joint)
    return logit_map, logit_map.vector(grad_logits.detach())


def _ratio(parts: Iterable[Tensor], whole: Iterable[Tensor]) -> Tensor:
    """|parts| / |whole| per problem and head, 0 where there is nothing."""
    over, under = (torch.stack([t.flatten(2).norm(dim=2) for t in tensors]).norm(dim=0) for tensors in (parts, whole))
    return torch.where(under == 0, 0.0, over / under)
