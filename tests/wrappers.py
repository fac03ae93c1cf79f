"""Every wrapper, by the name that it has in all tests of what must hold for each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Wrapper:
    """A wrapper.

    Args:
        build: (optimizer, model, example input, **settings) → the wrapper.
        settings: unless a test has its own. What is remembered is used between two measurements, as a rule.
        rule: the correction, of wrappers that have one: explicit Jacobians can give its gradients to a bare optimizer.
    """

    build: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    rule: Correction | None = None

    def __call__(self, inner: Optimizer, model: nn.Module, example: Tensor | None, **settings: Any) -> Any:
        return self.build(inner, model, example, **{**self.settings, **settings})


def corrected(rule: Correction) -> Wrapper:
    return Wrapper(lambda inner, model, example: GradientOnly(inner, model, rule), rule=rule)


def by_inputs(kind: type, **settings: Any) -> Wrapper:
    return Wrapper(lambda inner, model, example, **given: kind(inner, model, **given), settings)


def unit_consistent(inner: Optimizer, model: nn.Module, example: Tensor, every: int, **given: Any) -> UnitConsistent:
    return UnitConsistent(inner, model, gauge=gauge.NetworkGauge(every=every), example_input=example, **given)


WRAPPERS = {
    "proportional": corrected(Proportional()),
    "disproportional": corrected(Disproportional()),
    "batch-ideal": corrected(BatchIdeal(0.1, per_sample=False)),
    "input-scaled": by_inputs(InputScaled, every=4, floor=0.5, hold=True),
    "preconditioned": by_inputs(Preconditioned, decay=0.8, every=2),
    "unit-consistent": Wrapper(unit_consistent, {"every": 4}),
    "whitened": by_inputs(Whitened, every=4),
    "whitened-rank": by_inputs(Whitened, every=4, rank=2),
}
#: Those that keep something from step to step.
REMEMBERING = ("input-scaled", "preconditioned", "unit-consistent", "whitened", "whitened-rank")

each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
