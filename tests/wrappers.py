"""Every wrapper, by the name that it has in all tests of what must hold for each."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_optim import (
    BatchIdeal,
    Correction,
    Disproportional,
    GradientOnly,
    InputScaled,
    Preconditioned,
    Proportional,
    UnitConsistent,
    Whitened,
    gauge,
)

Wrap = Callable[[Optimizer, nn.Module, Tensor], Any]


def gradient_only(rule: Correction) -> Wrap:
    return lambda inner, model, example: GradientOnly(inner, model, rule)


def unit_consistent(inner: Optimizer, model: nn.Module, example: Tensor) -> UnitConsistent:
    return UnitConsistent(inner, model, gauge=gauge.NetworkGauge(every=4), example_input=example)


#: (optimizer, model, example input) → wrapper. What they remember is used between two measurements, as a rule.
WRAPPERS: dict[str, Wrap] = {
    "proportional": gradient_only(Proportional()),
    "disproportional": gradient_only(Disproportional()),
    "batch-ideal": gradient_only(BatchIdeal(0.1, per_sample=False)),
    "input-scaled": lambda inner, model, example: InputScaled(inner, model, every=4, floor=0.5, hold=True),
    "preconditioned": lambda inner, model, example: Preconditioned(inner, model, decay=0.8, every=2),
    "unit-consistent": unit_consistent,
    "whitened": lambda inner, model, example: Whitened(inner, model, every=4),
    "whitened-rank": lambda inner, model, example: Whitened(inner, model, every=4, rank=2),
}
#: Those that keep something from step to step.
REMEMBERING = ("input-scaled", "preconditioned", "unit-consistent", "whitened", "whitened-rank")

each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
