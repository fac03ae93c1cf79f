"""Networks and optimizers for tests of UnitConsistent."""

import torch
from torch import Tensor

from adiv_optim import UnitConsistent, gauge
from tests.helpers.gauge_models import mlp
from tests.helpers.loops import train as train
from tests.helpers.seeds import manual_seed

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
}

GAUGES = {"network": gauge.NetworkGauge(), "layer": gauge.LayerGauge()}


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
