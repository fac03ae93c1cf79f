"""Every wrapper, around every configuration of PyTorch's database of optimizers."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_optim import gauge as gauges
from tests import wrappers
from tests.helpers import by_hand, torch_database
from tests.helpers.by_hand import Method
from tests.helpers.seeds import manual_seed

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Around:
    """A wrapper of an optimizer of `network`.

    Args:
        wrap: (optimizer, model) → the wrapper.
        by_hand: returns what to do around the bare optimizer's step.
    """

    wrap: Callable[[Any, nn.Module], Any]
    by_hand: Callable[[], Method]


def around(name: str) -> Around:
    def wrap(optimizer: Optimizer, model: nn.Module) -> Any:
        graph = {"graph": _graph(bias=model[0].bias is not None)} if name == "unit-consistent" else {}
        return wrappers.WRAPPERS[name](optimizer, model, None, **by_hand.SETTINGS.get(name, {}), **graph)

    return Around(wrap, by_hand.METHODS[name])


@cache
def _graph(bias: bool) -> gauges.ChannelGraph:
    return gauges.trace(network(bias), torch.ones(1, 4))


AROUND = {name: around(name) for name in by_hand.METHODS}
BARE = Around(lambda optimizer, model: optimizer, lambda: by_hand.plain)
GRADIENT_ONLY = {name: each for name, each in AROUND.items() if wrappers.WRAPPERS[name].rule}

each_wrapper = pytest.mark.parametrize("wrapper", AROUND.values(), ids=AROUND)
each_gradient_only = pytest.mark.parametrize("wrapper", GRADIENT_ONLY.values(), ids=GRADIENT_ONLY)
#: What these are tested for does not depend on how well they train: SGD's own default is 0.001.
at_any_rate = pytest.mark.filterwarnings("ignore:GradientOnly. SGD's rate:UserWarning")
#: Its averages of weights are no part of the step.
of_any_state = pytest.mark.filterwarnings("ignore:ASGD keeps a copy of weights:UserWarning")
#: LBFGS is refused, which has a test of its own.
OPTIMIZERS = [name for name in torch_database.OPTIMIZERS if name != "LBFGS"]


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
    manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias), nn.ReLU(), nn.Linear(6, 3, bias))


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


def built(wrapper: Around, configuration: Configuration, **options: Any) -> tuple[nn.Module, Any]:
    """A network, and its optimizer in the wrapper."""
    model = configuration.network()
    return model, wrapper.wrap(configuration.build(model.parameters(), **options), model)


def train(model: nn.Module, optimizer: Any, steps: list[Batch]) -> None:
    for x, y in steps:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


Situation = Callable[[Around, Configuration], object]


def share(wrapper: Around, everything: bool, defaults: bool = False) -> list[Configuration]:
    """So many configurations that all wrappers together meet each; with `defaults` every optimizer's first as well."""
    place = list(AROUND.values()).index(wrapper)
    every = [(nth == 0, each) for name in OPTIMIZERS for nth, each in enumerate(configurations(name))]
    return [
        configuration
        for number, (first, configuration) in enumerate(every)
        if everything or (first and defaults) or number % len(AROUND) == place
    ]


def assert_as_bare(situation: Situation, wrapper: Around, chosen: Iterable[Configuration]) -> None:
    """In these configurations the situation passes, or raises what it raises without the wrapper."""
    for configuration in chosen:
        wanted, found = outcome(situation, BARE, configuration), outcome(situation, wrapper, configuration)
        assert (wanted == PASSES) == (configuration.optimizer != "SparseAdam"), wanted
        assert found == wanted, configuration


PASSES = "passes"


@cache
def outcome(situation: Situation, wrapper: Around, configuration: Configuration) -> str:
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
