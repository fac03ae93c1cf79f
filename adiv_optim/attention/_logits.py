"""Attention logits whose query and key projections receive the step the logits ask for."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..functional.shared import check_real, once_only
from ._map import PARAMETERS, LogitMap, arrange
from ._rule import AttentionIdeal, check_rule
from ._solve import solve


def scaled_products(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return s QKᵀ."""
    return (queries @ keys.mT) * scale


class _Logits(Function):
    """s QKᵀ, which hands the parameters of Q and K their gradients itself and Q and K the plain ones."""

    @staticmethod
    def forward(
        queries: Tensor,
        keys: Tensor,
        input: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        q_bias: Tensor | None,
        k_bias: Tensor | None,
        scale: float,
        mask: Tensor | None,
        rule: AttentionIdeal,
    ) -> Tensor:
        return scaled_products(queries, keys, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.scale, mask, ctx.rule = inputs
        # The parameters are kept for nothing but to be seen by a second derivative.
        ctx.present = [tensor is not None for tensor in tensors]
        ctx.save_for_backward(mask, *(tensor for tensor in tensors if tensor is not None))

    @staticmethod
    def backward(ctx, grad_output):
        mask, *saved = ctx.saved_tensors
        grad_output, *saved = once_only(grad_output, *saved)
        waiting = iter(saved)
        queries, keys, input = (next(waiting) for _ in range(3))
        parameters = [next(waiting) if there else None for there in ctx.present[3:]]
        needs_queries, needs_keys, _, *needed = ctx.needs_input_grad[: len(ctx.present)]
        trained = frozenset(name for name, needs in zip(PARAMETERS, needed, strict=True) if needs)
        gradients = {}
        if trained:
            joint = ctx.rule.joint
            logit_map = build(input, queries, keys, ctx.scale, mask, trained, joint)
            right = arrange(with_sequences(grad_output, 4).to(logit_map.rows.dtype), joint)
            parts = solve(logit_map, right, ctx.rule.damping, ctx.rule.tolerance, ctx.rule.max_iterations)
            gradients = logit_map.gradients(parts)
        scaled = grad_output * ctx.scale
        return (
            scaled @ keys if needs_queries else None,
            (queries.mT @ scaled).mT if needs_keys else None,
            None,
            *(
                gradients[name].to(parameter.dtype) if name in gradients and parameter is not None else None
                for name, parameter in zip(PARAMETERS, parameters, strict=True)
            ),
            None,
            None,
            None,
        )


def build(
    input: Tensor,
    queries: Tensor,
    keys: Tensor,
    scale: float,
    mask: Tensor | None,
    trained: frozenset[str],
    joint: bool,
) -> LogitMap:
    """The derivative of the logits of a batch, in float32 at least.

    Args:
        input: X, shape (sequences, tokens, features); like all below also without the first dimension.
        queries: Q, shape (sequences, heads, tokens, head_dim).
        keys: K, likewise.
        scale: s.
        mask: shape (sequences, heads, tokens, tokens) or one that broadcasts to it.
        trained: names out of `PARAMETERS`.
        joint: whether all sequences are one problem.
    """
    input, queries, keys = with_sequences(input, 3), with_sequences(queries, 4), with_sequences(keys, 4)
    dtype = torch.promote_types(torch.promote_types(input.dtype, queries.dtype), torch.float32)
    if mask is not None:
        mask = arrange(mask.expand(*queries.shape[:3], queries.shape[2]), joint)
    rows = input.to(dtype)
    return LogitMap(
        rows.unsqueeze(0) if joint else rows.unsqueeze(1),
        arrange(queries.to(dtype), joint),
        arrange(keys.to(dtype), joint),
        scale,
        mask,
        trained,
    )


def with_sequences(tensor: Tensor, dims: int) -> Tensor:
    """Give the tensor of a single sequence a dimension that counts sequences, if it has none."""
    return tensor if tensor.dim() == dims else tensor.unsqueeze(0)


def project(input: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int) -> Tensor:
    """Return the queries or keys, shape (…, heads, tokens, head_dim)."""
    return F.linear(input, weight, bias).unflatten(-1, (num_heads, -1)).transpose(-3, -2)


# Traced, the Function's backward would be opened up, and the solver's loop depends on data: it runs outside the graph,
# and fullgraph=True says that it cannot have the whole.
@torch.compiler.disable
def _corrected(
    input: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    num_heads: int,
    scale: float,
    mask: Tensor | None,
    rule: AttentionIdeal,
) -> Tensor:
    # The projections see parameters that stand still: through them flows the input's gradient and nothing else.
    q_weight, k_weight, q_bias, k_bias = (None if tensor is None else tensor.detach() for tensor in weights)
    assert q_weight is not None
    assert k_weight is not None
    queries = project(input, q_weight, q_bias, num_heads)
    keys = project(input, k_weight, k_bias, num_heads)
    found: Tensor = _Logits.apply(queries, keys, input.detach(), *weights, scale, mask, rule)
    return _masked(found, mask)


def _masked(found: Tensor, mask: Tensor | None) -> Tensor:
    return found if mask is None else found.masked_fill(~mask, -torch.inf)


def logits(
    input: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    *,
    num_heads: int,
    scale: float | None = None,
    correction: AttentionIdeal | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Attention logits :math:`s\,QK^\top` whose projections' gradients follow a correction.

    Forward and input gradient are the plain ones, bit for bit; the projections receive
    :math:`\theta = J^\top (JJ^\top + \lambda I)^{-1} g` in place of :math:`J^\top g` (see `AttentionIdeal`). A frozen
    parameter is left out of J. The solution is computed in float32 at least, and runs outside the graph under
    torch.compile (fullgraph=True raises). Forward-mode and second derivatives, and vmap, raise.

    Args:
        input: X, shape (sequences, tokens, features) or (tokens, features).
        q_weight: shape (num_heads · head_dim, features).
        k_weight: likewise.
        q_bias: shape (num_heads · head_dim,) or None.
        k_bias: likewise.
        num_heads: heads; rows of the weights belong to them in blocks, as in nn.MultiheadAttention.
        scale: s; 1/√head_dim by default.
        correction: the rule; None gives plain gradients.
        mask: boolean, True where a token may attend; broadcastable to the result. What is masked is -inf, and free
            to move as it likes.

    Returns:
        Y, shape (sequences, heads, tokens, tokens) or (heads, tokens, tokens).

    Raises:
        TypeError: input is not real floating-point, the mask not boolean, or the correction no `AttentionIdeal`.
        ValueError: shapes do not fit.

    Example:
        >>> import torch
        >>> from adiv_optim import attention
        >>> x, w = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.eye(2)
        >>> attention.logits(x, w, w, num_heads=1, scale=1.0)
        tensor([[[1., 1.],
                 [1., 2.]]])
    """
    scale = check(input, q_weight, k_weight, q_bias, k_bias, num_heads, scale, mask)
    if correction is not None:
        return _corrected(input, (q_weight, k_weight, q_bias, k_bias), num_heads, scale, mask, check_rule(correction))
    queries, keys = project(input, q_weight, q_bias, num_heads), project(input, k_weight, k_bias, num_heads)
    return _masked(scaled_products(queries, keys, scale), mask)


def check(
    input: Any,
    q_weight: Tensor,
    k_weight: Tensor,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    num_heads: int,
    scale: float | None,
    mask: Tensor | None,
) -> float:
    """Raise where the arguments of `logits` do not fit; return the scale."""
    check_real("attention", input)
    if input.dim() not in (2, 3):
        raise ValueError(
            f"attention: input of shape {tuple(input.shape)} has {input.dim()} dimensions; it must have 3, (sequences, "
            "tokens, features), or 2 for one sequence."
        )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
            raise ValueError(
                f"attention: {name} of shape {tuple(weight.shape)} does not take the {input.shape[-1]} features of the "
                f"input; it must have shape (num_heads · head_dim, {input.shape[-1]})."
            )
    if q_weight.shape != k_weight.shape:
        raise ValueError(
            f"attention: q_weight has shape {tuple(q_weight.shape)}, k_weight {tuple(k_weight.shape)}; queries and "
            "keys must have one shape."
        )
    if num_heads < 1 or q_weight.shape[0] % num_heads or not q_weight.shape[0]:
        raise ValueError(
            f"attention: num_heads is {num_heads}, which does not divide the {q_weight.shape[0]} rows of q_weight; "
            "choose one that does."
        )
    for name, bias in (("q_bias", q_bias), ("k_bias", k_bias)):
        if bias is not None and bias.shape != q_weight.shape[:1]:
            raise ValueError(
                f"attention: {name} has shape {tuple(bias.shape)}; it must be {tuple(q_weight.shape[:1])}, a number "
                "for each row of the weight."
            )
    if mask is not None:
        tokens = input.shape[-2]
        wanted = (*input.shape[:-2], num_heads, tokens, tokens)
        if mask.dtype != torch.bool:
            raise TypeError(
                f"attention: mask is {mask.dtype}; it must be torch.bool, True where a token may attend (an additive "
                "mask m is m == 0)."
            )
        if not broadcasts(mask.shape, wanted):
            raise ValueError(
                f"attention: mask of shape {tuple(mask.shape)} does not broadcast to the logits' {wanted}."
            )
    return (q_weight.shape[0] // num_heads) ** -0.5 if scale is None else scale


def broadcasts(shape: torch.Size, wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be expanded to the wanted one.

    Example:
        >>> broadcasts(torch.Size([1, 3]), (2, 3)), broadcasts(torch.Size([2, 2, 3]), (2, 3))
        (True, False)
    """
    return len(shape) <= len(wanted) and all(
        size in (1, there) for size, there in zip(reversed(shape), reversed(wanted), strict=False)
    )
