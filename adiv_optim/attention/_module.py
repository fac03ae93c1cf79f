"""Self-attention as a module."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._logits import logits
from ._projections import scaled_products, split_heads
from ._rule import AttentionIdeal, check_rule


class LogitProjection(nn.Linear):
    """A query or key projection under a correction: it holds the parameters, and `logits` uses them.

    Being no plain nn.Linear, it is left alone by `adiv_optim.attach`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Raise: called by itself it would give plain gradients without a word."""
        raise RuntimeError(
            "LogitProjection is not called by itself: its gradient is corrected through attention.logits. Build the "
            "SelfAttention with correction=None where plain projections are wanted."
        )


class SelfAttention(nn.Module):
    r"""Multi-head self-attention whose query and key projections may follow a correction.

    :math:`\mathrm{softmax}(s\,QK^\top)\,V W_o^\top` with s = 1/√head_dim, computed as written, without a fused kernel
    and without dropout. Forward is the same with and without a correction. The value and output projections
    (and with correction=None all four) are nn.Linear layers, which `adiv_optim.attach` can correct.

    Args:
        embed_dim: features of input and output.
        num_heads: heads; divides embed_dim.
        bias: whether the projections have biases.
        qk_norm: divide each query and key by its root mean square, without a learned gain: the normalisation
            that suits queries and keys (Henry et al. 2020, with RMS in place of L2), to compare with.
        correction: how the gradients of query and key projection are formed; None is plain.
        causal: let a token attend to itself and to those before it only.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: num_heads does not divide embed_dim, or qk_norm and a correction are both wanted.
        TypeError: the correction is no `AttentionIdeal`.

    Example:
        >>> import torch
        >>> from adiv_optim import attention
        >>> layer = attention.SelfAttention(8, 2, correction=attention.AttentionIdeal())
        >>> layer(torch.randn(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        qk_norm: bool = False,
        correction: AttentionIdeal | None = None,
        causal: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(
                f"SelfAttention: num_heads is {num_heads}, which does not divide embed_dim {embed_dim}; choose one "
                "that does."
            )
        if correction is not None and check_rule(correction) and qk_norm:
            raise ValueError(
                f"SelfAttention: qk_norm=True with correction={correction!r}. The correction solves for logits that "
                "are bilinear in the projections, which normalised queries and keys are not; choose one of the two."
            )
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.qk_norm, self.causal, self._correction = qk_norm, causal, correction
        inner = nn.Linear if correction is None else LogitProjection
        kinds = (inner, inner, nn.Linear, nn.Linear)
        projections = [kind(embed_dim, embed_dim, bias, device=device, dtype=dtype) for kind in kinds]
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = projections
        # The start of nn.MultiheadAttention: one Xavier bound for the three stacked, biases zero.
        limit = (6 / (4 * embed_dim)) ** 0.5
        for projection in projections[:3]:
            nn.init.uniform_(projection.weight, -limit, limit)
        for projection in projections if bias else []:
            nn.init.zeros_(projection.bias)

    @property
    def correction(self) -> AttentionIdeal | None:
        """The rule, fixed when the module is built."""
        return self._correction

    @classmethod
    def from_torch(
        cls,
        mha: nn.MultiheadAttention,
        *,
        qk_norm: bool = False,
        correction: AttentionIdeal | None = None,
        causal: bool = False,
    ) -> "SelfAttention":
        """Return a SelfAttention with a copy of the parameters of torch's; its input is always batch-first.

        Raises:
            ValueError: `mha` has other sizes of key or value, bias_kv, zero_attn or dropout, which this module lacks.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from adiv_optim import attention
            >>> mha, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
            >>> torch.allclose(attention.SelfAttention.from_torch(mha)(x), mha(x, x, x)[0], atol=1e-6)
            True
        """
        lacking = {
            "kdim or vdim": mha.in_proj_weight is None,
            "add_bias_kv": mha.bias_k is not None,
            "add_zero_attn": mha.add_zero_attn,
            "dropout": mha.dropout > 0,
        }
        if found := [name for name, there in lacking.items() if there]:
            raise ValueError(
                f"SelfAttention.from_torch: the nn.MultiheadAttention uses {', '.join(found)}, which SelfAttention "
                "does not have; build it without."
            )
        weight, bias = mha.in_proj_weight, mha.in_proj_bias
        settings = (mha.embed_dim, mha.num_heads, bias is not None, qk_norm, correction, causal)
        made = cls(*settings, weight.device, weight.dtype)
        state: dict[str, Tensor] = {
            f"out_proj.{name}": parameter for name, parameter in mha.out_proj.named_parameters()
        }
        for kind, stacked in (("weight", weight), ("bias", bias)):
            if stacked is not None:
                state |= {f"{side}_proj.{kind}": part for side, part in zip("qkv", stacked.chunk(3), strict=True)}
        made.load_state_dict(state)
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Map (sequences, tokens, embed_dim) or (tokens, embed_dim) to the same shape.

        Raises:
            ValueError: the input has not these dimensions.
            TypeError: the input is not real floating-point.
        """
        if input.dim() not in (2, 3) or input.shape[-1] != self.embed_dim:
            raise ValueError(
                f"SelfAttention: input of shape {tuple(input.shape)}; it must be (sequences, tokens, {self.embed_dim}) "
                f"or (tokens, {self.embed_dim})."
            )
        values = split_heads(self.v_proj(input), self.num_heads)
        return self.out_proj((self._logits(input).softmax(-1) @ values).transpose(-3, -2).flatten(-2))

    def _logits(self, input: Tensor) -> Tensor:
        tokens, q, k = input.shape[-2], self.q_proj, self.k_proj
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=input.device).tril() if self.causal else None
        if self._correction is not None:
            settings: dict[str, Any] = {"num_heads": self.num_heads, "correction": self._correction, "mask": mask}
            return logits(input, q.weight, k.weight, q.bias, k.bias, **settings)
        queries, keys = split_heads(q(input), self.num_heads), split_heads(k(input), self.num_heads)
        if self.qk_norm:
            queries, keys = F.rms_norm(queries, (self.head_dim,)), F.rms_norm(keys, (self.head_dim,))
        return scaled_products(queries, keys, self.head_dim**-0.5, mask)

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, qk_norm={self.qk_norm}, causal={self.causal}, "
            f"correction={self._correction!r}"
        )
