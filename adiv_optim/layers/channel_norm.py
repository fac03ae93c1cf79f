"""Squared norms over the channels of images, differentiable without copies of the image."""

import torch
from torch import Tensor
from torch.autograd import Function

from ..functional import squared_norm


class _SquaredNorm(Function):
    """|x|² along a dimension: no temporary of the input's size forward, one backward; torch makes one and three."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input, dim):
        return squared_norm(input, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, ctx.dim = inputs
        ctx.save_for_backward(input)
        ctx.save_for_forward(input)

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        return (input * (2 * grad_output).unsqueeze(ctx.dim)).to(input.dtype), None

    @staticmethod
    def jvp(ctx, tangent, _):
        (input,) = ctx.saved_tensors
        return 2 * (input * tangent).sum(ctx.dim, dtype=torch.promote_types(input.dtype, torch.float32))


def channel_squared_norm(input: Tensor, groups: int, dims: int) -> Tensor:
    """Σ_c x² over the channels of each group, in float32 at least: (…, C, *spatial) → (…, groups, *spatial)."""
    channels = -dims - 1
    input = input.unflatten(channels, (groups, -1))
    if torch.compiler.is_compiling():  # which fuses all of it, for any batch size
        return input.to(torch.promote_types(input.dtype, torch.float32)).square().sum(channels)
    return _SquaredNorm.apply(input, channels)
