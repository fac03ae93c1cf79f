"""Training by one row a step: a row's error is counted before the network learns from it.

`Loop` is the plain loop of one network. `Stack` is the same for many at once, whose rates and seeds differ.
"""

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.signal import lfilter
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from adiv_optim import attach

from .core.runs import Kind, Watch
from .optimizers import OF_MODELS
from .problems.streams import SIGNALS, Stream, StreamRun, network

#: κ of ObGD, as its authors have it.
KAPPA = 2.0
#: Of the running mean square that the remedy divides by, for each row.
DECAY = 0.95
#: Of Adam, torch's own.
BETAS, EPS = (0.9, 0.999), 1e-8


def share(bound: str | None, rates: Tensor, limits: Tensor, gradients: Sequence[Tensor], errors: Tensor) -> Tensor:
    r"""Return the share of its step that each network takes, (networks,).

    "norm" is :math:`\min(1, c / |g|_2)`, with c the limit. "overshooting" is ObGD's bound (Elsayed, Vasan and Mahmood
    2024, arXiv 2410.14606) without traces, :math:`1 / \max(1, \alpha \kappa \max(|\delta|, 1) |z|_1)`, with α the rate,
    δ the error, and z the gradient of the output.

    Args:
        bound: which of them; None is the whole step.
        rates: α, (networks,).
        limits: c, (networks,).
        gradients: of half the squared errors, so δz; the first dimension runs over networks.
        errors: δ, (networks,).
    """
    if bound is None:
        return torch.ones_like(errors)
    if bound == "norm":
        squares = sum(g.square().flatten(1).sum(1) for g in gradients)
        return (limits / torch.as_tensor(squares).sqrt()).clamp(max=1)
    size = torch.as_tensor(sum(g.abs().flatten(1).sum(1) for g in gradients)) / errors.abs()
    overshoot = rates * KAPPA * errors.abs().clamp(min=1) * size
    return 1 / overshoot.nan_to_num(nan=0.0).clamp(min=1)  # without an error there is no gradient


class Loop:
    """One network."""

    def __init__(self, run: StreamRun) -> None:
        self.run, self.model = run, network(run)
        optimizer = OF_MODELS[run.optimizer](self.model, run.lr)
        self.optimizer = run.make_method().wrap(optimizer, self.model, torch.empty(0))
        self.rate, self.limit = torch.tensor([run.lr]), torch.tensor([run.limit or math.inf])

    def step(self, window: Tensor, target: Tensor) -> Tensor:
        """Learn from one row, (1, 16) and (1,), and return the error of before, (1,)."""
        self.optimizer.zero_grad()
        error = self.model(window).squeeze(-1) - target
        error.square().div(2).sum().backward()
        if self.run.bound is not None:
            gradients: list[Any] = [p.grad for p in self.model.parameters()]
            part = share(self.run.bound, self.rate, self.limit, [g[None] for g in gradients], error.detach())
            torch._foreach_mul_(gradients, part.squeeze())
        self.optimizer.step()
        return error.detach()


class Stack:
    """Networks of runs that differ in rate, limit and seed; each takes the steps that `Loop` takes."""

    def __init__(self, runs: Sequence[StreamRun]) -> None:
        self.run, models = runs[0], [network(run) for run in runs]
        skeleton, correction = deepcopy(models[0]).to("meta"), self.run.make_method().correction
        if correction:
            attach(skeleton, correction)
        stacked, _ = stack_module_state(models)
        self.parameters = {name: parameter.detach() for name, parameter in stacked.items()}
        self.rates = torch.tensor([run.lr for run in runs])
        self.limits = torch.tensor([run.limit or math.inf for run in runs])
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters.values()]
        self.count = 0

        def loss(parameters: Any, window: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            error = functional_call(skeleton, parameters, (window[None],)).squeeze() - target
            return error.square() / 2, error

        self._batched = vmap(grad(loss, has_aux=True))
        self._traced: Any = None

    def step(self, windows: Tensor, targets: Tensor) -> Tensor:
        """Learn from a row for each network, (networks, 16) and (networks,), and return the errors of before."""
        if self._traced is None:  # vmap itself costs more than what it calls
            self._traced = make_fx(lambda *arguments: self._batched(*arguments))(self.parameters, windows, targets)
        gradients, errors = self._traced(self.parameters, windows, targets)
        steps = list(gradients.values())
        factors = self.rates * share(self.run.bound, self.rates, self.limits, steps, errors)
        if self.run.optimizer == "adam":
            steps = self._adam(steps)
        for parameter, step in zip(self.parameters.values(), steps, strict=True):
            parameter.addcmul_(step, factors.view(-1, *[1] * (step.dim() - 1)), value=-1)
        return errors

    def _adam(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        self.count += 1
        corrections = [1 - beta**self.count for beta in BETAS]
        steps = []
        for (first, second), gradient in zip(self.moments, gradients, strict=True):
            first.lerp_(gradient, 1 - BETAS[0])
            second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            steps.append((first / corrections[0]) / ((second / corrections[1]).sqrt() + EPS))
        return steps


def relative_error(errors: Tensor, signal: Stream) -> float | None:
    """Return Σ(e/s)² / Σ(y/s)² over the second half of a stream; None unless it is finite."""
    half = slice(len(errors) // 2, None)
    squares = [(part[half] / signal.scales[half]).double().square().sum() for part in (errors, signal.targets)]
    value = (squares[0] / squares[1]).item()
    return value if math.isfinite(value) else None


def by_running_rms(signal: Stream) -> Stream:
    """Divide all by the running root mean square of the windows, the current one included: known before the target."""
    squares = np.square(signal.windows).mean(1)
    rms = np.sqrt(lfilter([1 - DECAY], [1.0, -DECAY], squares, zi=[DECAY * squares[0]])[0]) + 1e-6
    return Stream(signal.windows / rms[:, None], signal.targets / rms, signal.scales / rms)


@cache
def _stream(name: str, seed: int, rows: int, running_rms: bool) -> Stream:
    signal = SIGNALS[name](np.random.default_rng(seed), rows)
    signal = by_running_rms(signal) if running_rms else signal
    return Stream(*(torch.tensor(part, dtype=torch.get_default_dtype()) for part in signal))


def signal_of(run: StreamRun) -> Stream:
    """Return the rows of a run, as tensors."""
    return _stream(run.signal, run.seed, run.steps or 0, bool(run.running_rms))


def train(runs: Sequence[StreamRun], watch: Watch) -> list[dict[str, Any]]:
    """Train runs of one family, side by side where vmap can; `seconds` are a share of all."""
    if len(runs) > 1 and runs[0].method == "whitened":
        return [result for run in runs for result in train([run], watch)]
    signals = [signal_of(run) for run in runs]
    windows, targets = (torch.stack([signal[part] for signal in signals], 1) for part in (0, 1))
    start, errors = time.process_time(), torch.full_like(targets, math.nan)
    trainer = Loop(runs[0]) if len(runs) == 1 else Stack(runs)
    for row, (window, target) in enumerate(zip(windows, targets, strict=True)):
        errors[row] = trainer.step(window, target)
        watch.tick()
        if not errors[row].isfinite().any():
            break
    seconds = round((time.process_time() - start) / len(runs), 3)
    return [
        {"error": relative_error(errors[:, number], signal), "seconds": seconds}
        for number, signal in enumerate(signals)
    ]


#: How runs are made.
STREAMS = Kind(
    load=lambda run, download: None,
    steps=lambda run, data: run.steps,
    train=lambda runs, data, watch: train(runs, watch),
    score=lambda result: result["error"],
    alike=lambda run: (run.norm, run.optimizer, run.method),
    family=lambda run: replace(run, lr=1.0, seed=0, limit=run.limit and 1.0),
)
