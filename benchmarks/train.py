"""One training run by a plain loop, for a number of steps or for seconds: settings, optimizers, loop and record.

A problem is a file of `problems`: it draws the network, and gives loss and error.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from .core.runs import NOBODY, Kind, Run, Watch, fingerprint, set_rates, ten_times
from .methods import METHODS, Method
from .optimizers import OF_MODELS

#: Normalisers with a learned scale and shift, behind the linear layers inside a network.
NORMS: dict[str, list[type[nn.Module]]] = {"none": [], "batchnorm": [nn.BatchNorm1d], "layernorm": [nn.LayerNorm]}
#: Steps over which the learning rate rises.
WARM_UP = 20
#: Rows of these count beside the inputs, where a wrapper reads inputs.
DERIVATIVES = "derivatives"
#: How often a run is measured.
MEASUREMENTS = 25


@dataclass(frozen=True)
class FieldRun(Run):
    """The settings that these runs have in common."""

    norm: str = "none"
    optimizer: str = "adam"
    lr: float | None = 1e-2  # None of an optimizer that has none
    seed: int = 0
    steps: int | None = 500
    seconds: float | None = None  # of processor time, in place of steps

    kind = "images"
    norms: ClassVar[Collection[str]] = tuple(NORMS)
    #: Of the further fields of a problem: what they may be, and those that have to be positive.
    known: ClassVar[Mapping[str, Collection[Any]]] = {}
    positive: ClassVar[Collection[str]] = ()

    def __post_init__(self) -> None:
        self.check(("lr", "steps", "seconds", *self.positive), norm=self.norms, optimizer=OF_MODELS, **self.known)
        if callable(METHODS[self.method].optimizer):
            raise ValueError(f"method {self.method!r} has an optimizer of its own; give this study a wrapper alone.")
        if (self.steps is None) == (self.seconds is None):
            raise ValueError(f"steps is {self.steps} and seconds is {self.seconds}; a run has one of them.")

    @property
    def damped(self) -> bool:
        """Whether there is a damping to choose."""
        return super().damped or OF_MODELS[self.optimizer].damped

    def make_method(self) -> Method:
        """The method, with this run's damping unless that is the optimizer's."""
        return METHODS[self.method] if OF_MODELS[self.optimizer].damped else super().make_method()

    def computes(self) -> str:
        """A hash of what its method computes."""
        return _computes(METHODS[self.method])


@cache
def _computes(method: Method) -> str:
    # More rows and columns than a whitening of rank 16 tells apart.
    inputs = torch.arange(24 * 20, dtype=torch.float64).square().sin().view(24, 20)
    model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))
    return fingerprint(method, model, inputs, torch.arange(24) % 3)


def limit(length: float | int, share: float = 1.0) -> dict[str, Any]:
    """Seconds, or steps where the length is a whole number."""
    if isinstance(length, int):
        return {"steps": max(1, round(share * length)), "seconds": None}
    return {"steps": None, "seconds": share * length}


class Problem(ABC):
    """A network, a loss and an error, made from the settings of a run."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Draw the network by the run's seed."""

    @abstractmethod
    def loss(self, model: nn.Module, optimizer: Any) -> Tensor:
        """Return the loss of the next step, which the optimizer is to take."""

    def terms(self) -> Any:
        """Return the loss of the next step by its terms, for optimizers that take them."""
        raise ValueError(f"{type(self).__name__} has no terms, which this optimizer takes; choose another optimizer.")

    @abstractmethod
    def error(self, model: nn.Module) -> float:
        """Return the number that a run is judged by; lower is better."""


def perceptron(
    widths: Sequence[int], norm: str = "none", activation: Callable[[], nn.Module] = nn.ReLU,
    linear: Callable[[int, int], nn.Module] = nn.Linear,
) -> list[nn.Module]:  # fmt: skip
    """Linear layers of some widths, and a normaliser and an activation between each two."""
    layers = [linear(*widths[:2])]
    for inputs, outputs in pairwise(widths[1:]):
        layers += [*(kind(inputs) for kind in NORMS[norm]), activation(), linear(inputs, outputs)]
    return layers


def xavier(model: nn.Module) -> nn.Module:
    """Draw weights by Xavier's initialisation, and set biases to 0."""
    for parameter in model.parameters():
        nn.init.xavier_normal_(parameter) if parameter.dim() > 1 else nn.init.zeros_(parameter)
    return model


def carried(
    model: nn.Module, x: Tensor, weights: Sequence[float], count: Callable[[nn.Module, Tensor], None] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return u (n, m) at x (n, d), its gradient (n, m, d), and Σₖ cₖ ∂²u/∂xₖ² (n, m); c are weights, u tanh layers.

    Derivatives are carried forward; `count` is given every linear layer with the rows of them that it multiplies.
    """
    first = torch.eye(x.shape[-1], dtype=x.dtype).expand(len(x), -1, -1)
    second, c = torch.zeros_like(x), torch.tensor(weights, dtype=x.dtype).view(-1, 1)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            rows = torch.cat([first, second.unsqueeze(1)], 1)
            if count is not None:
                count(layer, rows)
            rows = F.linear(rows, layer.weight)
            x, first, second = layer(x), rows[:, :-1], rows[:, -1]
        else:
            x = layer(x)
            slope = 1 - x.square()
            second = slope * (second - 2 * x * (c * first.square()).sum(1))
            first = slope.unsqueeze(1) * first
    return x, first.mT, second


def ready(run: FieldRun, problem: Problem) -> tuple[nn.Module, Optimizer, Callable[[], Any]]:
    """Return the network, the run's optimizer in its method's wrapper, and the closure that its steps take."""
    model, kind = problem.model(), OF_MODELS[run.optimizer]
    own = {"damping": run.damping} if kind.damped else {}
    optimizer = run.make_method().wrap(kind.make(model, run.lr, **own), model, torch.empty(0))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = problem.loss(model, optimizer)
        loss.backward()
        return loss

    return model, optimizer, closure


def ten_steps(run: FieldRun, problem: Problem) -> Callable[[], None]:
    """Ten training steps, to be timed."""
    _, optimizer, closure = ready(run, problem)
    return ten_times(partial(optimizer.step, closure))


#: A measurement counts up to this share of a run's seconds, or half a second more than these.
LATEST = 1.01


def train(run: FieldRun, problem: Problem, watch: Watch = NOBODY) -> dict[str, list[Any]]:
    """Train one run: the learning rate rises over 20 steps and falls to 0 by a cosine; some search for their own.

    Returned are, by measurement, the steps taken before, the seconds of processor time, measurements left out, and the
    error, None where it is not finite, which ends the run.
    """
    model, optimizer, closure = ready(run, problem)
    history: dict[str, list[Any]] = {"steps": [], "seconds": [], "error": []}
    kind, spent, number, next_at = OF_MODELS[run.optimizer], 0.0, 0, 0.0
    has_slow_steps, last, before = run.seconds and (kind.searches or kind.takes_terms), 0.0, list[Tensor]()
    while True:
        progress = number / run.steps if run.steps else spent / (run.seconds or 1.0)
        is_over = getattr(optimizer, "converged", False)  # of those that search
        if run.seconds and spent > max(LATEST * run.seconds, run.seconds + 0.5):
            if not has_slow_steps:
                return history
            # Such a step has come too late.
            number, spent, is_over = number - 1, spent - last, True
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.data.copy_(old)
        if progress >= next_at or progress >= 1 or is_over:
            next_at += 1 / MEASUREMENTS
            error = problem.error(model)
            history["steps"].append(number)
            history["seconds"].append(round(spent, 6))
            history["error"].append(float(f"{error:.6g}") if math.isfinite(error) else None)
            watch.note(number, {"error": history["error"][-1:]})
        if progress >= 1 or is_over or history["error"][-1] is None:
            return history
        if not kind.searches:
            set_rates([optimizer], min(1.0, (number + 1) / WARM_UP) * (1 + math.cos(math.pi * progress)) / 2)
        before = [p.detach().clone() for p in model.parameters()] if has_slow_steps else []
        start = time.process_time()
        optimizer.step(problem.terms() if kind.takes_terms else closure)
        last = time.process_time() - start
        spent += last
        number += 1
        watch.tick()


def kind_of(problem_of: Callable[[Any], Problem], pace: int = 0) -> Kind:
    """How runs are made whose problem is made from the settings; those of some seconds take about `pace` steps each."""
    return Kind(
        steps=lambda run, data: run.steps or round(pace * run.seconds),
        train=lambda runs, data, watch: [train(run, problem_of(run), watch) for run in runs],
        score=lambda result: result["error"][-1],  # None if the run diverged
    )
