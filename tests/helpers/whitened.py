"""Small models for tests of Whitened."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import Whitened
from tests.helpers.seeds import manual_seed

EXACT = 1e-9


def linear() -> nn.Module:
    return nn.Linear(5, 3)


LAYERS = {
    "linear": (linear, (7, 5)),
    "linear, few rows": (linear, (2, 5)),
    "linear, tokens": (linear, (2, 4, 5)),
    "linear, no bias": (lambda: nn.Linear(5, 3, bias=False), (7, 5)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 5, 5)),
    "conv2d, groups, stride, dilation": (lambda: nn.Conv2d(4, 6, 3, 2, 2, 2, groups=2), (2, 4, 9, 9)),
    "conv2d, same, reflect": (lambda: nn.Conv2d(2, 3, 2, padding="same", padding_mode="reflect"), (2, 2, 5, 5)),
    "conv1d, depthwise": (lambda: nn.Conv1d(3, 6, 3, groups=3, bias=False), (2, 3, 8)),
}


def backward(model: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    output = model(x)
    g = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output.dtype)
    (output * g).sum().backward()
    return output


def small(seed: int = 0, **options):
    manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return model, Whitened(inner, model, **{"every": 2, **options})


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 6, generator=generator, dtype=torch.float64), torch.randint(4, (16,), generator=generator))
        for _ in range(count)
    ]


def train(model: nn.Module, optimizer, data) -> list[Tensor]:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]
