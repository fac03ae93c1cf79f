"""One random network, trained in a wrapper and by hand."""

import copy
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import adiv_optim
from adiv_optim import GradientOnly, gauge
from tests.fuzz.by_hand import Method
from tests.fuzz.by_inputs import InputScaled, Preconditioned, Whitened
from tests.fuzz.channels import UnitConsistent
from tests.fuzz.corrected import BatchIdeal, Disproportional, Proportional
from tests.fuzz.networks import Network
from tests.fuzz.trainings import Training, network

#: What is smaller than this part of the largest parameter is compared with that: rounding is 1e-16 of it.
ROUNDING = 1e-7

Settings = dict[str, Any]


def _preconditioned(draw: random.Random) -> Settings:
    return {
        "damping": draw.choice([0.1, 1.0, 10.0]), "decay": draw.choice([0.0, 0.5, 0.9]),
        "every": draw.choice([1, 2, 3, 10]), "max_dim": draw.choice([None, 1024, 6, 3]),
    }  # fmt: skip


def _whitened(draw: random.Random) -> Settings:
    return {**_preconditioned(draw), "graft_norm": draw.random() < 0.5, "rank": None}


#: Every wrapper by hand, and the settings that a seed draws for it.
BY_HAND: dict[str, tuple[Callable[..., Method], Callable[[random.Random], Settings]]] = {
    "proportional": (Proportional, lambda draw: {}),
    "disproportional": (Disproportional, lambda draw: {}),
    "batch-ideal": (
        BatchIdeal, lambda draw: {"damping": draw.choice([0.03, 0.3, 1.0, 10.0]), "per_sample": draw.random() < 0.5}
    ),
    "input-scaled": (InputScaled, lambda draw: {
        "floor": draw.choice([0.1, 0.5, 1.0, 2.0]), "decay": draw.choice([0.0, 0.5, 0.9]),
        "every": draw.choice([1, 2, 3, 10]), "hold": draw.random() < 0.5,
    }),
    "preconditioned": (Preconditioned, _preconditioned),
    "unit-consistent": (
        UnitConsistent, lambda draw: {"gauge": draw.choice(["network", "layer"]), "every": draw.choice([1, 2])}
    ),
    "whitened": (Whitened, _whitened),
    "whitened-rank": (Whitened, lambda draw: {**_whitened(draw), "rank": draw.choice([1, 1, 2, 3])}),
}  # fmt: skip


def wrapped(
    name: str, inner: Optimizer, model: nn.Module, example: Tensor, settings: Settings, graph: Any = None
) -> Any:
    """The wrapper of that name; what has been traced of the model is not traced again."""
    kind = "".join(word.capitalize() for word in name.removesuffix("-rank").split("-"))
    if name in ("proportional", "disproportional", "batch-ideal"):
        return GradientOnly(inner, model, getattr(adiv_optim, kind)(**settings))
    if name == "unit-consistent":
        rules = {"network": gauge.NetworkGauge, "layer": gauge.LayerGauge}
        rule = rules[settings["gauge"]](every=settings["every"])
        return adiv_optim.UnitConsistent(inner, model, gauge=rule, example_input=example, graph=graph)
    return getattr(adiv_optim, kind)(inner, model, **settings)


def drawn(name: str, seed: int) -> Settings:
    """The wrapper's settings of a seed."""
    return BY_HAND[name][1](random.Random(f"settings {seed}"))


def deviation(name: str, seed: int) -> float:
    """`path_deviation` of a random network, its training and settings."""
    return path_deviation(name, *network(seed), drawn(name, seed))


def path_deviation(name: str, model: Network, training: Training, settings: Settings) -> float:
    """Greatest difference of any parameter or gradient, after any step, over how far it has come.

    Raises:
        AmbiguousError: the wrapper's own definition leaves it open what is right.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most random networks are hard to treat
        twin = copy.deepcopy(model)
        method = BY_HAND[name][0](twin, training, **settings)
        optimizer = wrapped(name, training.optimizer(model), model, training.inputs[0], settings)
        start = {path: p.detach().clone() for path, p in model.named_parameters()}
        least = ROUNDING * max(float(p.abs().max()) for p in start.values())
        worst = 0.0
        for step in range(len(training.inputs)):
            if step == 1 and training.late:
                training.grow(optimizer, model)
                method.grow()
            method.step()
            take_step(optimizer, model, training, step)
            found = {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
            if found.keys() != method.left.keys():
                return math.inf
            ends = [{path: p.detach() - start[path] for path, p in m.named_parameters()} for m in (model, twin)]
            worst = _worst(worst, *_ratios(found, method.left, least), *_ratios(*ends, least))
    return worst


def take_step(optimizer: Any, model: Network, training: Training, step: int) -> None:
    """Both passes of a training step, and the step."""
    optimizer.zero_grad()
    batches = training.batches(step)
    if training.wasted:
        with torch.no_grad():
            model(7 * batches[0][0] % 5)
        if (loss := training.loss(model(batches[0][0]), batches[0][1], step)).requires_grad:
            loss.backward()
        optimizer.zero_grad()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter in model.parameters():
        if id(parameter) not in held:  # of which zero_grad() knows nothing
            parameter.grad = None
    if training.count and hasattr(optimizer, "count_rows"):
        optimizer.count_rows(*training.counted(model, step))
    for x, y in batches:
        if (loss := training.loss(model(x), y, step)).requires_grad:
            loss.backward()
    optimizer.step()


def _ratios(found: dict[str, Tensor], wanted: dict[str, Tensor], least: float) -> list[float]:
    """Greatest differences over greatest sizes; of what is far smaller than the others, over a part of theirs."""
    sizes = {path: float(part.abs().max()) for path, part in wanted.items()}
    least = max(least, 1e-3 * max(sizes.values(), default=0.0))
    return [float((found[path] - part).abs().max()) / max(sizes[path], least) for path, part in wanted.items()]


def _worst(*ratios: float) -> float:
    """The greatest; NaN is greater than all others."""
    return max(ratios, key=lambda ratio: math.inf if math.isnan(ratio) else ratio)
