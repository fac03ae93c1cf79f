"""Models whose function rescaling leaves alone, in float64, each with an input and how many scales are free."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn


class Convolutions(nn.Module):
    """Residual add, concat, grouped, depthwise and transposed convolution, both poolings, PReLU, a gain, flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.grouped = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.slope = nn.PReLU(6)
        self.depthwise = nn.Conv2d(12, 24, 3, padding=1, groups=12)
        self.gain = nn.Parameter(torch.rand(24, 1, 1) + 0.5)
        self.up = nn.ConvTranspose2d(24, 4, 2, stride=2, groups=2)
        self.head = nn.Linear(4 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = x + self.slope(self.grouped(x))  # 6 channels, those of the stem
        x = torch.cat([x, F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, stride=1)], 1)
        x = F.max_pool2d(self.depthwise(x).abs(), 2) * self.gain  # 24, and another 24
        x = F.leaky_relu(F.max_pool2d(self.up(x), 2), 0.1)  # 4
        return self.head(x.flatten(1))


class Block(nn.Module):
    """A pre-norm transformer on tokens, written by hand: RMSNorm, packed attention, SwiGLU, tied embedding."""

    def __init__(self, dim: int = 8, heads: int = 2, hidden: int = 12, tokens: int = 11) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(tokens, dim)
        self.position = nn.Parameter(torch.randn(1, 5, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.Parameter(torch.rand(dim) + 0.5)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mix = nn.Linear(dim, dim)
        self.gate, self.up, self.down = nn.Linear(dim, hidden), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attention = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.mix((attention @ v).transpose(1, 2).flatten(2))
        normed = x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * self.norm2
        x = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x @ self.embed.weight.t()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 4)
    )


def normed(model: nn.Module, eps: float = 1e-30) -> nn.Module:
    """Give BatchNorm statistics and weights that are not all 0 and 1, and take its eps away (torch 2.15 refuses 0)."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = eps
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias)
    return model


def resnet18() -> nn.Module:
    return normed(torchvision.models.resnet18(num_classes=10))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, norm_first=True, batch_first=True, dropout=0.0)


@dataclass(frozen=True)
class ModelCase:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    free: int

    def model(self) -> Any:
        return self.build().double()

    def input(self) -> Tensor:
        if self.build is Block:
            return torch.randint(11, self.shape)
        return torch.randn(self.shape, dtype=torch.float64)


# Free scales by hand. ResNet-18: a convolution's output, and a stream or hidden layer behind each BatchNorm.
MODELS = {
    "mlp": ModelCase(mlp, (3, 6), 8 + 8 + 7),
    "convolutions": ModelCase(Convolutions, (2, 3, 8, 8), 6 + 24 + 24 + 4),
    "resnet18": ModelCase(
        resnet18, (2, 3, 32, 32), 64 * 5 + 128 * 5 + 256 * 5 + 512 * 5 + (64 * 3 + 128 * 3 + 256 * 3 + 512 * 3)
    ),
    "transformer": ModelCase(encoder, (2, 5, 8), 8 + 8 + 8 + 12),  # γ, values, γ, hidden
    "block": ModelCase(Block, (2, 5), 8 + 8 + 8 + 12),
}
