"""A pre-norm GPT whose normaliser can be exchanged or left out, and text as characters for it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim.layers import AffineLikeLinear, ChannelScale, DyT, convert

#: The --data argument of the text that ships with Python.
DEFAULT = "python-reference"
#: Share of the steps in which the rate rises to its peak.
WARM_UP = 0.05


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
    "deep": Preset(layers=12, width=128, heads=4, context=64, batch_size=16),
    "million": Preset(layers=5, width=128, heads=4, context=64, batch_size=16),
    "gpu": Preset(layers=6, width=384, heads=6, context=256, batch_size=64),
}


class Derf(ChannelScale):
    """Elementwise γ erf(αx + s) + β with α and s trained too, of arXiv 2512.10938."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.alpha, self.shift = nn.Parameter(torch.full((1,), 0.5)), nn.Parameter(torch.zeros(1))

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, width) to the same shape."""
        return super().forward(torch.erf(self.alpha * input + self.shift))


#: Width → normaliser of the blocks. Affine-like is no normaliser before the linear layers of a block but another kind
#: of them; SkipInit multiplies each branch by a learned number, at first 0.
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layernorm": nn.LayerNorm,
    "rmsnorm": nn.RMSNorm,
    "dyt": DyT,
    "derf": Derf,
    "affine-like": nn.Identity,
    "gains": ChannelScale,
    "skip-init": nn.Identity,
    "head-layernorm": nn.Identity,
    "none": nn.Identity,
}
#: The one before the head, where it is another.
HEAD_NORMS: dict[str, Callable[[int], nn.Module]] = {**NORMS, "head-layernorm": nn.LayerNorm}

#: What tables and figures call them.
NORM_LABELS = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "dyt": "DyT",
    "derf": "Derf",
    "affine-like": "affine-like layers",
    "gains": "gain and shift per channel",
    "skip-init": "SkipInit",
    "head-layernorm": "LayerNorm before the head alone",
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

    attention_gain: nn.Parameter | None
    mlp_gain: nn.Parameter | None

    def __init__(self, width: int, heads: int, norm: str) -> None:
        super().__init__()
        self.attention_norm, self.attention = NORMS[norm](width), CausalSelfAttention(width, heads)
        self.mlp_norm, self.mlp = NORMS[norm](width), MLP(width)
        for name in ("attention_gain", "mlp_gain"):
            self.register_parameter(name, nn.Parameter(torch.zeros(1)) if norm == "skip-init" else None)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        x = x + _times(self.attention_gain, self.attention(self.attention_norm(x)))
        return x + _times(self.mlp_gain, self.mlp(self.mlp_norm(x)))


def _times(gain: Tensor | None, branch: Tensor) -> Tensor:
    return branch if gain is None else gain * branch


class GPT(nn.Module):
    """A pre-norm transformer with learned positions and an untied head, drawn as GPT-2 is.

    Args:
        preset: its size.
        vocabulary: how many characters there are.
        norm: a key of `NORMS`; without a normaliser the initialisation is the same.
        embedding_deviation: of the embeddings at first; None is GPT-2's 0.02. With DyT and Derf the embeddings are then
            multiplied by a learned number, at first √width.
    """

    def __init__(self, preset: Preset, vocabulary: int, norm: str, embedding_deviation: float | None = None) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, preset.width)
        self.position_embedding = nn.Embedding(preset.context, preset.width)
        self.blocks = nn.ModuleList(Block(preset.width, preset.heads, norm) for _ in range(preset.layers))
        self.norm = HEAD_NORMS[norm](preset.width)
        self.head = nn.Linear(preset.width, vocabulary, bias=False)
        # DyT's authors give language models this number to learn: without it activations start too small for a tanh
        # that divides by nothing, and training does not get going.
        scaled = norm in ("dyt", "derf") and embedding_deviation is None
        scale = nn.Parameter(torch.full((1,), math.sqrt(preset.width))) if scaled else None
        self.register_parameter("embedding_scale", scale)
        self._initialise(preset.layers, 0.02 if embedding_deviation is None else embedding_deviation)
        if norm == "affine-like":
            convert(self.blocks, {nn.Linear: AffineLikeLinear})

    def _initialise(self, layers: int, embeddings: float) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # Two projections per block write to the residual stream: its variance shall not grow with depth.
                deviation = 0.02 / math.sqrt(2 * layers) if name.endswith("projection") else 0.02
                deviation = embeddings if isinstance(module, nn.Embedding) else deviation
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


def all_windows(text: Tensor, preset: Preset) -> Tensor:
    """Cut a text into windows, (windows, context + 1), so that every character but the first is predicted once."""
    return text.unfold(0, preset.context + 1, preset.context)


def warm_up_steps(total: int) -> int:
    """How many steps the rate rises."""
    return max(1, round(WARM_UP * total))


def rate_factor(number: int, total: int) -> float:
    """The share of its peak that the rate has at step `number` of 1 … `total`: a linear rise, then a cosine.

    It reaches 0 where the run has ended: every step moves the weights.
    """
    warm_up = warm_up_steps(total)
    if number <= warm_up:
        return number / warm_up
    return (1 + math.cos(math.pi * (number - 1 - warm_up) / (total - warm_up))) / 2


class Text(NamedTuple):
    """A text, as the numbers of its characters.

    Args:
        train: the first eight tenths, int64.
        validation: the next tenth.
        test: the last tenth.
        vocabulary: all characters of the text; a character's number is its place here.
    """

    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: str

    def to(self, device: str) -> "Text":
        """Return the text on `device`."""
        return Text(self.train.to(device), self.validation.to(device), self.test.to(device), self.vocabulary)


def python_reference() -> str:
    """The Python language reference as `pydoc` ships it, every paragraph once: 0.37 million characters.

    It is the same wherever the Python version is. Topics quote each other at length, so that without removing the
    copies much of the last tenth would stand in the first eight.
    """
    from pydoc_data.topics import topics

    paragraphs = [paragraph.strip("\n") for name in sorted(topics) for paragraph in topics[name].split("\n\n")]
    return "\n\n".join(dict.fromkeys(paragraphs))


def load(data: str) -> Text:
    """Load a text by its --data argument: `DEFAULT`, or the path of a UTF-8 file.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if data == DEFAULT:
        return split(python_reference())
    path = Path(data)
    if not path.is_file():
        raise FileNotFoundError(f"--data {data}: there is no such file; it must be a text, or {DEFAULT!r}.")
    return split(path.read_text(encoding="utf-8"))


def split(characters: str) -> Text:
    """Number the characters of a text and cut it, in its own order, into eight tenths, one and one."""
    vocabulary = "".join(sorted(set(characters)))
    places = {character: place for place, character in enumerate(vocabulary)}
    numbers = torch.tensor([places[character] for character in characters])
    tenth = len(numbers) // 10
    train, validation, test = numbers.split([len(numbers) - 2 * tenth, tenth, tenth])
    return Text(train, validation, test, vocabulary)
