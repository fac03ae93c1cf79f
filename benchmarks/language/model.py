"""The network: a pre-norm GPT whose normaliser can be exchanged or left out."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim.layers import AffineLikeLinear, DyT, convert


@dataclass(frozen=True)
class Preset:
    """The size of a network and of its batches.

    Args:
        layers: how many blocks.
        width: of the residual stream.
        heads: of every attention.
        context: characters a prediction can see, itself the last.
        batch_size: windows of that length per step.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch_size: int


PRESETS = {
    "tiny": Preset(layers=1, width=16, heads=2, context=8, batch_size=4),
    "small": Preset(layers=3, width=128, heads=4, context=64, batch_size=16),
    "million": Preset(layers=5, width=128, heads=4, context=64, batch_size=16),
    "gpu": Preset(layers=6, width=384, heads=6, context=256, batch_size=64),
}


#: Width → normaliser. Affine-like is no normaliser before the linear layers of a block but another kind of them.
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layernorm": nn.LayerNorm,
    "rmsnorm": nn.RMSNorm,
    "dyt": DyT,
    "affine-like": nn.Identity,
    "none": nn.Identity,
}

#: What tables and figures call them.
NORM_LABELS = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "dyt": "DyT",
    "affine-like": "affine-like layers",
    "none": "no normaliser",
}


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what is before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        # (batch, positions, 3, heads, width of a head) → three of (batch, heads, positions, width of a head)
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with GELU between them, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expansion, self.projection = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, width) to the same shape."""
        return self.projection(F.gelu(self.expansion(x)))


class Block(nn.Module):
    """Attention and MLP, each normalised at its input and added to the residual stream."""

    def __init__(self, width: int, heads: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(width), CausalSelfAttention(width, heads)
        self.mlp_norm, self.mlp = norm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A pre-norm transformer with learned positions and an untied head, drawn as GPT-2 is.

    Args:
        preset: its size.
        vocabulary: how many characters there are.
        norm: a key of `NORMS`; without a normaliser the initialisation is the same. With DyT the embeddings are
            multiplied by a learned number, at first √width.
    """

    def __init__(self, preset: Preset, vocabulary: int, norm: str) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, preset.width)
        self.position_embedding = nn.Embedding(preset.context, preset.width)
        self.blocks = nn.ModuleList(Block(preset.width, preset.heads, NORMS[norm]) for _ in range(preset.layers))
        self.norm = NORMS[norm](preset.width)
        self.head = nn.Linear(preset.width, vocabulary, bias=False)
        # DyT's authors give language models this number to learn: without it activations start too small for a tanh
        # that divides by nothing, and training does not get going.
        scale = nn.Parameter(torch.full((1,), math.sqrt(preset.width))) if norm == "dyt" else None
        self.register_parameter("embedding_scale", scale)
        self._initialise(preset.layers)
        if norm == "affine-like":
            convert(self.blocks, {nn.Linear: AffineLikeLinear})

    def _initialise(self, layers: int) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # Two projections per block write to the residual stream: its variance shall not grow with depth.
                deviation = 0.02 / math.sqrt(2 * layers) if name.endswith("projection") else 0.02
                nn.init.normal_(module.weight, std=deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map characters, (batch, positions), to logits of the next, (batch, positions, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        if self.embedding_scale is not None:
            x = self.embedding_scale * x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_character_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy, in nats per character, over windows of shape (batch, context + 1)."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
