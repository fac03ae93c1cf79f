"""Attention logits whose query and key projections receive the step the logits ask for."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..functional.shared import once_only
from ._map import LogitMap
from ._projections import Projections, scaled_products
from ._rule import AttentionIdeal, check_rule
from ._solve import solve


class _Logits(Function):
    """s QKᵀ, which hands the parameters of Q and K their gradients itself and Q and K the plain ones."""

    @staticmethod
    def forward(
        scale: float, rule: AttentionIdeal, names: tuple[str, ...], mask: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        queries, keys, _, *_ = tensors  # then X and the parameters that `names` names
        return scaled_products(queries, keys, scale, mask)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale, ctx.rule, ctx.names, *tensors = inputs
        # The parameters are kept for nothing but to be seen by a second derivative.
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad_output):
        mask, *saved = ctx.saved_tensors
        grad_output, queries, keys, input, *parameters = once_only(grad_output, *saved)
        _, _, _, _, needs_queries, needs_keys, _, *needed = ctx.needs_input_grad
        trained = frozenset(name for name, needs in zip(ctx.names, needed, strict=True) if needs)
        gradients = {}
        if trained:
            logit_map = LogitMap(input, queries, keys, ctx.scale, mask, trained, ctx.rule.joint)
            gradients = logit_map.gradients(solve(logit_map, logit_map.vector(grad_output), ctx.rule))
        scaled = (grad_output if mask is None else grad_output.masked_fill(~mask, 0.0)) * ctx.scale
        return (
            *[None] * 4,
            scaled @ keys if needs_queries else None,
            (queries.mT @ scaled).mT if needs_keys else None,
            None,
            *(
                gradients[name].to(parameter.dtype) if name in gradients else None
                for name, parameter in zip(ctx.names, parameters, strict=True)
            ),
        )


# Traced, the Function's backward would be opened up, and the solver's loop depends on data: it runs outside the graph,
# and fullgraph=True says that it cannot have the whole.
@torch.compiler.disable
def _corrected(given: Projections, rule: AttentionIdeal) -> Tensor:
    # The projections see parameters that stand still: through them flows the input's gradient and nothing else.
    parameters, mask, input = given.parameters, given.mask, given.input.detach()
    still: dict[str, Any] = {name: parameter.detach() for name, parameter in parameters.items()}
    settings, projected = (given.factor, rule, tuple(parameters)), replace(given, **still).projected()
    return _Logits.apply(*settings, mask, *projected, input, *parameters.values())


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
    :math:`\theta = J^\top (JJ^\top + \lambda I)^{-1} g` in place of :math:`J^\top g` (see `AttentionIdeal`), in float32
    at least. A frozen parameter is left out of J. Under torch.compile this runs outside the graph
    (fullgraph=True raises). Forward-mode and second derivatives, and vmap, raise.

    Args:
        input: X, shape (sequences, tokens, features) or (tokens, features).
        q_weight: shape (num_heads · head_dim, features).
        k_weight: likewise.
        q_bias: shape (num_heads · head_dim,) or None.
        k_bias: likewise.
        num_heads: heads; rows of the weights belong to them in blocks, as in nn.MultiheadAttention.
        scale: s; 1/√head_dim by default.
        correction: the rule; None gives plain gradients.
        mask: boolean, True where a token may attend; broadcastable to the result. Masked logits are -inf,
            and free to move.

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
    given = Projections(input, q_weight, k_weight, q_bias, k_bias, num_heads, scale, mask)
    if correction is not None:
        return _corrected(given, check_rule(correction))
    return scaled_products(*given.projected(), given.factor, mask)
