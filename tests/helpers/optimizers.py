"""Every wrapper, around every configuration of PyTorch's database of optimizers."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_optim import (
    BatchIdeal,
    Correction,
    Disproportional,
    GradientOnly,
    Preconditioned,
    Proportional,
    UnitConsistent,
    Whitened,
)
from adiv_optim import gauge as gauges
from tests.helpers import by_hand, torch_database
from tests.helpers.by_hand import DAMPING, DECAY, Method

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Wrapper:
    """A wrapper.

    Args:
        wrap: (optimizer, model) → the wrapper.
        by_hand: returns what to do around the bare optimizer's step.
    """

    wrap: Callable[[Any, nn.Module], Any]
    by_hand: Callable[[], Method]


def gradient_only(correction: Correction, by_hand: Callable[[], Method]) -> Wrapper:
    return Wrapper(lambda optimizer, model: GradientOnly(optimizer, model, correction), by_hand)


def unit_consistent(optimizer: Optimizer, model: nn.Module) -> UnitConsistent:
    return UnitConsistent(optimizer, model, graph=_graph(bias=model[0].bias is not None))


@cache
def _graph(bias: bool) -> gauges.ChannelGraph:
    return gauges.trace(network(bias), torch.ones(1, 4))


WRAPPERS = {
    "proportional": gradient_only(Proportional(), lambda: by_hand.proportional),
    "disproportional": gradient_only(Disproportional(), lambda: by_hand.disproportional),
    "batch-ideal": gradient_only(BatchIdeal(DAMPING, per_sample=False), lambda: by_hand.batch_ideal),
    "preconditioned": Wrapper(
        lambda optimizer, model: Preconditioned(optimizer, model, damping=DAMPING, every=1, decay=DECAY),
        by_hand.preconditioned,
    ),
    "unit-consistent": Wrapper(unit_consistent, lambda: by_hand.unit_consistent),
    "whitened": Wrapper(lambda optimizer, model: Whitened(optimizer, model, every=1, decay=DECAY), by_hand.whitened),
}
BARE = Wrapper(lambda optimizer, model: optimizer, lambda: by_hand.plain)
GRADIENT_ONLY = {name: WRAPPERS[name] for name in ("proportional", "disproportional", "batch-ideal")}

each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
each_gradient_only = pytest.mark.parametrize("wrapper", GRADIENT_ONLY.values(), ids=GRADIENT_ONLY)
#: What these are tested for does not depend on how well they train: SGD's own default is 0.001.
at_any_rate = pytest.mark.filterwarnings("ignore:GradientOnly. SGD's rate:UserWarning")
#: LBFGS is refused, which has a test of its own.
each_optimizer = pytest.mark.parametrize("name", [name for name in torch_database.OPTIMIZERS if name != "LBFGS"])


@dataclass(frozen=True)
class Configuration:
    """Arguments of an optimizer."""

    optimizer: str
    description: str
    options: dict[str, Any] = field(compare=False)

    def build(self, parameters: Any, **options: Any) -> Optimizer:
        """The bare optimizer."""
        # A copy: schedulers write into learning rates that are tensors.
        return getattr(torch.optim, self.optimizer)(parameters, **copy.deepcopy({**self.options, **options}))

    def network(self) -> nn.Module:
        """What it can optimize: torch.optim.Muon takes matrices alone."""
        return network(bias=self.optimizer != "Muon")


def configurations(name: str) -> list[Configuration]:
    """The optimizer's own, and its implementations."""
    info = torch_database.optimizers()[name]
    fused = ["fused"] if "cpu" in info.supports_fused_on else []
    implementations = [flag for flag in info.supported_impls if flag == "foreach"] + fused
    return [Configuration(name, entry.desc, entry.kwargs) for entry in info.optim_inputs_func("cpu")] + [
        Configuration(name, flag, {flag: True}) for flag in implementations
    ]


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias), nn.ReLU(), nn.Linear(6, 3, bias))


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


def built(wrapper: Wrapper, configuration: Configuration, **options: Any) -> tuple[nn.Module, Any]:
    """A network, and its optimizer in the wrapper."""
    model = configuration.network()
    return model, wrapper.wrap(configuration.build(model.parameters(), **options), model)


def train(model: nn.Module, optimizer: Any, steps: list[Batch]) -> None:
    for x, y in steps:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


Situation = Callable[[Wrapper, Configuration], object]


def assert_as_bare(
    situation: Situation, wrapper: Wrapper, name: str, chosen: list[Configuration] | None = None
) -> None:
    """In all configurations the situation passes, or raises what it raises without the wrapper."""
    for configuration in chosen or configurations(name):
        wanted, found = outcome(situation, BARE, configuration), outcome(situation, wrapper, configuration)
        assert (wanted == PASSES) == (name != "SparseAdam"), wanted
        assert found == wanted, configuration


PASSES = "passes"


@cache
def outcome(situation: Situation, wrapper: Wrapper, configuration: Configuration) -> str:
    """Whether it passes, or the error; what it asserts must hold wherever it gets so far."""
    try:
        situation(wrapper, configuration)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return PASSES


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """Bit for bit."""
    for (path, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), path


def deviation(found: nn.Module, wanted: nn.Module, start: nn.Module) -> float:
    """Greatest difference of a parameter's path, over its greatest part."""
    return max(
        ((p - q).abs().max() / (q - s).abs().max()).item()
        for p, q, s in zip(found.parameters(), wanted.parameters(), start.parameters(), strict=True)
    )
