"""PyTorch's database of optimizers: every configuration as the training of a small network, shared out by wrappers."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_optim import gauge
from tests.fuzz import compare, trainings
from tests.fuzz.networks import Network, Step
from tests.fuzz.trainings import Training
from tests.helpers import torch_database
from tests.helpers.seeds import manual_seed
from tests.helpers.steps import weights
from tests.wrappers import WRAPPERS

#: LBFGS is refused, ASGD by wrappers that map weights, and SparseAdam takes no dense gradients: all have other tests.
OPTIMIZERS = [name for name in torch_database.OPTIMIZERS if name not in ("LBFGS", "ASGD", "SparseAdam")]
#: Random networks that each wrapper has.
NETWORKS = 4


@dataclass(frozen=True)
class Configuration:
    optimizer: str
    description: str
    options: dict[str, Any] = field(compare=False)

    def build(self, parameters: Any) -> Optimizer:
        # A copy: schedulers write into learning rates that are tensors.
        return getattr(torch.optim, self.optimizer)(parameters, **copy.deepcopy(self.options))

    def network(self) -> Network:
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


def network(bias: bool = True) -> Network:
    manual_seed(0)
    layers = [nn.Linear(4, 6, bias), nn.ReLU(), nn.Linear(6, 3, bias)]
    return Network(layers, [Step("call", (place,), place) for place in range(3)], kept=layers[2])


@cache
def traced(bias: bool) -> gauge.ChannelGraph:
    return gauge.trace(network(bias), torch.ones(1, 4))


@dataclass(frozen=True)
class Whole(Training):
    """The training of a model all of whose parameters one configuration optimizes."""

    configuration: Configuration | None = None

    def optimizer(self, model: nn.Module) -> Optimizer:
        assert self.configuration is not None
        return self.configuration.build(model.parameters())


def training(configuration: Configuration, steps: int = 3) -> Training:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = ([torch.randn(8, size, generator=generator) for _ in range(steps)] for size in (4, 3))
    return Whole(inputs, targets, 1, False, [], [], configuration.build, configuration=configuration)


@dataclass(frozen=True)
class Case:
    """A network to be trained in a wrapper.

    Args:
        label: what a failure says.
        make: returns the network and its training.
        settings: the wrapper's.
        configuration: of the optimizer, if it is one of the database.
    """

    label: str
    make: Callable[[], tuple[Network, Training]]
    settings: compare.Settings
    configuration: Configuration | None = None

    def start(self, name: str, moved: float = 0.0) -> tuple[Any, Training]:
        """The optimizer in the wrapper of that name, which holds the network as `model`, and the training.

        With `moved`, weights begin where only a checkpoint brings them back from.
        """
        model, training = self.make()
        with torch.no_grad():
            for p in model.parameters() if moved else ():
                p += moved
        graph = traced(self.configuration.optimizer != "Muon") if self.configuration else None
        optimizer = compare.wrapped(name, training.optimizer(model), model, training.inputs[0], self.settings, graph)
        if training.late:
            training.grow(optimizer, model)
        return optimizer, training

    def bare(self) -> Any:
        """The optimizer without the wrapper, which holds another network as `model`."""
        model, training = self.make()
        optimizer: Any = training.optimizer(model)
        if training.late:
            training.grow(optimizer, model)
        optimizer.model = model
        return optimizer


def of_database(name: str, everything: bool, defaults: bool = False) -> list[Case]:
    """So many configurations that all wrappers together meet each; with `defaults` every optimizer's first as well."""
    every = [(nth == 0, each) for kind in OPTIMIZERS for nth, each in enumerate(configurations(kind))]
    return [
        Case(
            f"{each.optimizer}, {each.description}",
            lambda each=each: (each.network(), training(each)),
            settings(name, number),
            each,
        )
        for number, (first, each) in enumerate(every)
        if everything or (first and defaults) or number % len(WRAPPERS) == place(name)
    ]


def of_random_networks(name: str) -> list[Case]:
    """Some that no other wrapper has."""
    seeds = range(NETWORKS * place(name), NETWORKS * (place(name) + 1))
    return [Case(f"network {seed}", lambda seed=seed: trainings.network(seed), settings(name, seed)) for seed in seeds]


def settings(name: str, number: int, **given: Any) -> compare.Settings:
    drawn = compare.drawn(name, number)
    return drawn | {key: value for key, value in given.items() if key in drawn}


def place(name: str) -> int:
    return list(WRAPPERS).index(name)


def train(optimizer: Any, training: Training, steps: range) -> list[Tensor]:
    """The weights after these steps; batches come again and again."""
    for step in steps:
        compare.take_step(optimizer, optimizer.model, training, step % len(training.inputs))
    return weights(optimizer.model)


def identical(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists agree in every bit: +0 is not -0, and NaN is NaN."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.detach().view(torch.int64), b.detach().view(torch.int64)) for a, b in pairs)
