"""One row a step, predicted before it is learned: gradient-only rules against structural remedies and bounded steps.

A row is a window of 16 values, a target, and the scale that errors are divided by. An arm's learning rate is the best
of ten on two seeds that no table shows, or of more until it lies between two others.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.cbook import get_sample_data
from numpy.lib.stride_tricks import sliding_window_view
from scipy.signal import lfilter
from torch import Tensor, nn

from ..core.runs import Kind, Watch
from ..optimizers import OF_MODELS
from ..train import MEASUREMENTS, FieldRun, perceptron

#: Values in a window, and units of both hidden layers.
TAPS, WIDTH = 16, 64
#: Steps of Euler's method in a unit of time, and units of time between two values of the Mackey-Glass series.
FINE, SPACING = 10, 3
#: κ of ObGD, as its authors have it.
KAPPA = 2.0
#: Of the running mean square that the remedy divides by, for each row.
DECAY = 0.95


class Stream(NamedTuple):
    """A signal, row by row."""

    windows: Any  # (rows, 16)
    targets: Any  # (rows,)
    scales: Any  # (rows,), of the targets


def resonance(generator: np.random.Generator, count: int) -> np.ndarray:
    """An autoregression of order 2 with variance 1."""
    innovations = generator.normal(size=count + 500)
    return lfilter([1.0], [1.0, -1.6, 0.8], innovations)[500:] / np.sqrt(1.8 / (0.2 * (1.8**2 - 1.6**2)))


def coloured(generator: np.random.Generator, rows: int, follows: bool = True) -> Stream:
    """A coloured signal; its target has the same amplitude, which wanders over two orders of magnitude, or none."""
    count = rows + TAPS - 1
    signal = resonance(generator, count)
    scale = np.exp(lfilter([0.15], [1.0, -0.995], generator.normal(size=count + 2000))[2000:])
    mixing, readout = generator.normal(size=(TAPS, 8)) / TAPS**0.5, generator.normal(size=8) / 8**0.5
    scales = scale[TAPS - 1 :] if follows else np.ones(rows)
    targets = scales * (np.tanh(sliding_window_view(signal, TAPS) @ mixing) @ readout)
    return Stream(sliding_window_view(scale * signal, TAPS), targets, scales)


def echo(generator: np.random.Generator, rows: int) -> Stream:
    """The echo of speech-like bursts behind a loudspeaker that saturates; half of the time is a pause."""
    level = np.concatenate([
        10 ** generator.uniform(-1, 0.5) * generator.integers(2) * np.hanning(length)
        for length in generator.integers(50, 300, size=rows // 50 + 2)
    ])[: rows + TAPS - 1]  # fmt: skip
    speech = level * resonance(generator, rows + TAPS - 1) + 1e-3 * generator.normal(size=rows + TAPS - 1)
    path = generator.normal(size=TAPS) * np.exp(-np.arange(TAPS)[::-1] / 4)
    targets = sliding_window_view(np.tanh(speech), TAPS) @ path + 1e-3 * generator.normal(size=rows)
    return Stream(sliding_window_view(speech, TAPS), targets, np.ones(rows))


def mackey_glass(generator: np.random.Generator, rows: int) -> Stream:
    """The next value of a chaotic series whose scale drifts over two orders of magnitude and back in 500 rows."""
    delay, count = 17 * FINE, rows + TAPS
    values = list(generator.uniform(0.5, 1.3, size=delay + 1))
    for _ in range(FINE * SPACING * (count + 100)):
        now, before = values[-1], values[-delay - 1]
        values.append(now + (0.2 * before / (1 + before**10) - 0.1 * now) / FINE)
    series = np.array(values)[:: FINE * SPACING][-count:]
    scale = 10 ** np.sin(2 * np.pi * (np.arange(count) / 500 + generator.uniform()))
    series = scale * (series - series.mean()) / series.std()
    return Stream(sliding_window_view(series, TAPS)[:-1], series[TAPS:], scale[TAPS:])


def membrane(generator: np.random.Generator, rows: int, ahead: int = 5) -> Stream:
    """Matplotlib's recording of a cell's membrane potential, five samples ahead; a seed draws where it begins."""
    path: Any = get_sample_data("membrane.dat", asfileobj=False)
    series = np.fromfile(path, np.float32).astype(float)
    count = rows + TAPS - 1 + ahead
    start = generator.integers(1000, 10500 - count)  # it is at rest before and after
    series = series[start : start + count]
    series = (series - series[:200].mean()) / series[:200].std()
    return Stream(sliding_window_view(series, TAPS)[:-ahead], series[TAPS - 1 + ahead :], np.ones(rows))


SIGNALS: dict[str, Callable[[np.random.Generator, int], Stream]] = {
    "coloured": coloured, "coloured-plain": partial(coloured, follows=False), "echo": echo,
    "mackey-glass": mackey_glass, "membrane": membrane,
}  # fmt: skip


@dataclass(frozen=True)
class StreamRun(FieldRun):
    """One network and one signal, drawn by one seed; it has as many steps as rows."""

    signal: str = "coloured"
    bound: str | None = None  # of steps: "norm" of the gradient or "overshooting"
    limit: float | None = None  # of that norm
    running_rms: bool | None = None  # windows and targets are divided by it

    known, positive = {"signal": SIGNALS}, ("limit",)


def by_running_rms(signal: Stream) -> Stream:
    """Divide all by the running root mean square of the windows, the current one included: known before the target."""
    squares = np.square(signal.windows).mean(1)
    rms = np.sqrt(lfilter([1 - DECAY], [1.0, -DECAY], squares, zi=[DECAY * squares[0]])[0]) + 1e-6
    return Stream(signal.windows / rms[:, None], signal.targets / rms, signal.scales / rms)


def signal_of(run: StreamRun) -> Stream:
    """Return the rows of a run, as tensors."""
    signal = SIGNALS[run.signal](np.random.default_rng(run.seed), run.steps or 0)
    signal = by_running_rms(signal) if run.running_rms else signal
    return Stream(*(torch.tensor(part, dtype=torch.get_default_dtype()) for part in signal))


def share(rate: float, gradients: Sequence[Tensor], error: Tensor) -> Tensor:
    """The share of its step that ObGD takes (Elsayed, Vasan and Mahmood 2024, arXiv 2410.14606) without traces.

    It is 1 / max(1, ακ max(|δ|, 1) |z|₁) with the rate α, the error δ, and z the gradient of the output: those of half
    the squared error are δz.
    """
    size = torch.stack([g.abs().sum() for g in gradients]).sum() / error.abs()
    overshoot = rate * KAPPA * error.abs().clamp(min=1) * size
    return 1 / overshoot.nan_to_num(nan=0.0).clamp(min=1)  # without an error there is no gradient


class Loop:
    """A tanh network and the optimizer that learns row by row."""

    def __init__(self, run: StreamRun) -> None:
        torch.manual_seed(run.seed)
        self.run, self.model = run, nn.Sequential(*perceptron((TAPS, WIDTH, WIDTH, 1), run.norm, nn.Tanh))
        optimizer = OF_MODELS[run.optimizer].make(self.model, run.lr)
        self.optimizer = run.make_method().wrap(optimizer, self.model, torch.empty(0))

    def step(self, window: Tensor, target: Tensor) -> Tensor:
        """Learn from a row, (16,) and (), and return the error of before."""
        self.optimizer.zero_grad()
        error = self.model(window[None]).squeeze() - target
        error.square().div(2).backward()
        if self.run.bound == "norm":
            nn.utils.clip_grad_norm_(self.model.parameters(), self.run.limit or math.inf)
        elif self.run.bound == "overshooting":
            gradients: list[Any] = [parameter.grad for parameter in self.model.parameters()]
            torch._foreach_mul_(gradients, share(self.run.lr or 0.0, gradients, error.detach()))
        self.optimizer.step()
        return error.detach()


def relative_error(errors: Tensor, signal: Stream) -> float | None:
    """Return Σ(e/s)² / Σ(y/s)² over the second half of a stream; None unless it is finite."""
    half = slice(len(signal.targets) // 2, None)
    squares = [(part[half] / signal.scales[half]).double().square().sum() for part in (errors, signal.targets)]
    value = (squares[0] / squares[1]).item()
    return value if math.isfinite(value) else None


def train(run: StreamRun, watch: Watch) -> dict[str, Any]:
    """Train one run, until its rows or its finite errors end."""
    signal, loop = signal_of(run), Loop(run)
    start, errors = time.process_time(), torch.full_like(signal.targets, math.nan)
    for row, (window, target) in enumerate(zip(signal.windows, signal.targets, strict=True)):
        errors[row] = loop.step(window, target)
        watch.tick()
        if row % (len(errors) // MEASUREMENTS or 1) == 0:
            watch.note(row, {"error": [errors[row].item()]})
        if not errors[row].isfinite():
            break
    return {"error": relative_error(errors, signal), "seconds": round(time.process_time() - start, 6)}


#: How runs are made.
STREAMS = Kind(
    steps=lambda run, data: run.steps,
    train=lambda runs, data, watch: [train(run, watch) for run in runs],
    score=lambda result: result["error"],
)
