"""Networks and optimizers for tests of UnitConsistent."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import UnitConsistent, gauge
from tests.helpers.seeds import manual_seed


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 4)
    )


class ConvNet(nn.Module):
    """Residual add, concat, grouped and depthwise convolution, max and average pooling, PReLU, flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.prelu = nn.PReLU(8)
        self.side = nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(12 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        x = x + self.grouped(F.leaky_relu(self.depthwise(x)))
        x = torch.cat([self.prelu(x), F.relu(self.side(x))], 1)
        return self.head(F.avg_pool2d(x, 2).flatten(1))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
}

GAUGES = {"network": gauge.NetworkGauge(), "layer": gauge.LayerGauge()}


def train(model: nn.Module, optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def batches_for(shape: tuple[int, ...], steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64), torch.randint(4, shape[:1], generator=generator))
        for _ in range(steps)
    ]


def wrapped(build=OPTIMIZERS["adamw"], seed: int = 0, **options):
    manual_seed(seed)
    model = mlp()
    example = torch.randn(2, 6)
    return model, UnitConsistent(build(model.parameters()), model, example_input=example, **options)


BATCHES = batches_for((16, 6), 6)
