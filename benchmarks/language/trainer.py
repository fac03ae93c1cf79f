"""Training one run, and measuring it on text it does not train on."""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.progress import Kind, Tick
from .model import GPT, Preset, next_character_loss
from .run import TextRun, build_optimizers, scheduled, warm_up_steps
from .text import Text, load

#: Measurements in a run, beside the one before its first step.
MEASUREMENTS = 20
#: Windows of the validation text that each of them reads, spread over it evenly.
VALIDATION_WINDOWS = 256


@dataclass
class History:
    """What a run leaves behind; losses are nats per character, None where they are not finite.

    Args:
        steps: taken before each measurement.
        validation_loss: at each measurement.
        train_loss: mean over the steps since the measurement before; None before the first step.
        seconds: of training before each measurement, evaluation left out.
        test_loss: on all of the test text, after the last step.
        diverged: whether a loss was not finite, which ended the run.
    """

    steps: list[int] = field(default_factory=list)
    validation_loss: list[float | None] = field(default_factory=list)
    train_loss: list[float | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    test_loss: float | None = None
    diverged: bool = False


def train(run: TextRun, text: Text, *, tick: Tick = lambda: None) -> History:
    """Train one run.

    Args:
        run: the settings.
        text: what it trains on, on the run's device.
        tick: called after every step.

    Raises:
        ValueError: a part of the text is shorter than a window.
    """
    trainer = Trainer(run, text)
    trainer.measure(0, [])
    every, losses = max(1, round(run.steps / MEASUREMENTS)), list[float]()
    for number, windows in enumerate(batches(run, text.train), start=1):
        losses.append(trainer.step(number, windows))
        tick()
        diverged = not math.isfinite(losses[-1])
        if diverged or number % every == 0 or number == run.steps:
            trainer.measure(number, losses)
            losses = []
        if trainer.history.diverged:
            return trainer.history
    trainer.history.test_loss = _finite(trainer.evaluate(all_windows(text.test, run.size)))
    return trainer.history


class Trainer:
    """A model, its optimizers, and the record of its training."""

    def __init__(self, run: TextRun, text: Text) -> None:
        self.run, self.scheduled, self.history = run, scheduled(run.method), History()
        self.model = build_model(run, len(text.vocabulary))
        self.optimizers = build_optimizers(self.model, run)
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        windows = all_windows(text.validation, run.size)
        self._validation = windows[:: math.ceil(len(windows) / VALIDATION_WINDOWS)]
        self._seconds, self._started = 0.0, time.perf_counter()
        self._set_mode(training=True)

    def step(self, number: int, windows: Tensor) -> float:
        """Take the step of this number, from 1, and return the loss before it; a loss not finite is not stepped on."""
        if self.scheduled:
            factor = rate_factor(number, self.run.steps)
            for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = factor * peak
        self.model.zero_grad()
        loss = next_character_loss(self.model, windows)
        value = loss.item()
        if math.isfinite(value):
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
        return value

    def measure(self, step: int, losses: list[float]) -> None:
        """Record the state after `step` steps, `losses` being those since the last measurement."""
        if self.run.device.startswith("cuda"):
            torch.cuda.synchronize()
        self._seconds += time.perf_counter() - self._started if step else 0.0
        training = _finite(math.fsum(losses) / len(losses)) if losses else None
        validation = _finite(self.evaluate(self._validation))
        history = self.history
        history.steps.append(step)
        history.seconds.append(self._seconds)
        history.train_loss.append(training)
        history.validation_loss.append(validation)
        history.diverged = validation is None or (step > 0 and training is None)
        self._started = time.perf_counter()

    @torch.no_grad()
    def evaluate(self, windows: Tensor) -> float:
        """Mean loss over windows."""
        self._set_mode(training=False)
        parts = windows.split(self.run.size.batch_size)
        total = sum(next_character_loss(self.model, part).item() * len(part) for part in parts)
        self._set_mode(training=True)
        return total / len(windows)

    def _set_mode(self, *, training: bool) -> None:
        self.model.train(training)
        # Optimizers that average weights, as schedule-free ones do, decide which ones the model holds.
        for optimizer in self.optimizers:
            switch = getattr(optimizer, "train" if training else "eval", None)
            if switch:
                switch()


def build_model(run: TextRun, vocabulary: int) -> GPT:
    """Draw the network of a run; on the CPU, so that every device starts from the same numbers."""
    torch.manual_seed(run.seed)
    return GPT(run.size, vocabulary, run.norm).to(run.device)


def rate_factor(number: int, total: int) -> float:
    """The share of its peak that the rate has at step `number` of 1 … `total`: a linear rise, then a cosine.

    It reaches 0 where the run has ended: every step moves the weights.
    """
    warm_up = warm_up_steps(total)
    if number <= warm_up:
        return number / warm_up
    return (1 + math.cos(math.pi * (number - 1 - warm_up) / (total - warm_up))) / 2


def batches(run: TextRun, text: Tensor) -> Iterator[Tensor]:
    """Yield the windows of every step, (batch, context + 1): drawn by the seed, whatever the method."""
    generator = torch.Generator().manual_seed(run.seed)
    size = run.size.context + 1
    _check_length(text, size)
    inside = torch.arange(size, device=text.device)
    for _ in range(run.steps):
        starts = torch.randint(len(text) - size + 1, (run.size.batch_size, 1), generator=generator)
        yield text[starts.to(text.device) + inside]


def all_windows(text: Tensor, preset: Preset) -> Tensor:
    """Cut a text into windows, (windows, context + 1), so that every character but the first is predicted once."""
    _check_length(text, preset.context + 1)
    return text.unfold(0, preset.context + 1, preset.context)


def _check_length(text: Tensor, size: int) -> None:
    if len(text) < size:
        raise ValueError(f"a part of the text has {len(text)} characters, fewer than one window's {size}.")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def final_validation_loss(result: dict[str, Any]) -> float | None:
    """The loss after the last step; None if the run diverged."""
    return None if result["diverged"] else result["validation_loss"][-1]


def _results(runs: list[TextRun], text: Text, tick: Tick) -> list[dict[str, Any]]:
    return [
        {
            "size": asdict(run.size),
            "characters": sum(len(part) for part in text[:3]),
            "vocabulary": len(text.vocabulary),
            **asdict(train(run, text, tick=tick)),
        }
        for run in runs
    ]


#: How runs of the language model are made.
LANGUAGE = Kind(
    load=lambda run, download: load(run.data).to(run.device),
    steps=lambda run, text: run.steps,
    family=lambda run: run,
    train=_results,
    score=final_validation_loss,
)
